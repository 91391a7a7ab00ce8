"""Entry point of a child process of `start --local`.

Watch the parent (see `watch`), then run one of our commands.
"""

from __future__ import annotations

import sys

from thinwire.node.runtime.parent_watch import watch


def main(arguments: list[str]) -> int:
    """Run `alone …` (see baseline.py) or any thinwire command. Return its exit code."""
    watch(sys.stdin.fileno())
    # Import after the watch has started: loading takes seconds, in which the parent may die too.
    if arguments[:1] == ["alone"]:
        from thinwire.node.local_swarm.baseline import main as alone

        return alone(arguments[1:])
    from thinwire.node.cli.main import main as command

    return command(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
