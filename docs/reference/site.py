"""Hook of mkdocs: files of the checkout outside of docs/ are not part of the site, so links to them become their paths."""

import re
from typing import Any

_OUTSIDE = re.compile(
    r"\[`?([^\]`]+)`?\]\((?:\.\./)+((?:README|CONTRIBUTING|CHANGELOG)\.md|(?:examples|benchmarks|tests)/[^)]*)\)"
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page with the path in the place of each link to a file outside of docs/."""
    return _OUTSIDE.sub(lambda match: f"`{match[1]}`", markdown)
