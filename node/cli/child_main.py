"""Entry point of a child process of `start --local`.

Watch the parent (see `watch`), then run one of our commands.
"""

from __future__ import annotations

import sys

from thinwire.node.runtime.parent_watch import watch


def main(arguments: list[str]) -> int:
    """Run `alone …` (see baseline.py), `standby …` or any thinwire command. Return its exit code.

    `standby` loads all modules and kernels, which takes seconds, then waits for a line with the invite and joins with
    it.
    """
    if arguments[:1] == ["standby"]:
        from thinwire.compression.compile_kernels import warm_up
        from thinwire.node.daemon import daemon  # noqa: F401

        warm_up()
        invite = sys.stdin.readline().strip()
        if not invite:
            return 0
        arguments = ["join", invite, *arguments[1:]]
    watch(sys.stdin.fileno())
    # Import after the watch has started: loading takes seconds, in which the parent may die too.
    if arguments[:1] == ["alone"]:
        from thinwire.node.local_swarm.baseline import main as alone

        return alone(arguments[1:])
    from thinwire.node.cli.main import main as command

    return command(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
