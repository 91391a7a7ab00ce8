"""Commands about the daemon of this machine, running or not: they read its status.

Heavy modules are imported inside the functions.
"""

from __future__ import annotations

import ipaddress
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from thinwire.node.cli.arguments import MOST, Debug, Home, InputError, Json, finite, settings
from thinwire.node.cli.completion import peers, runs
from thinwire.node.daemon.options import seconds_of
from thinwire.swarm.identity.errors import HintedError, NotInstalled

if TYPE_CHECKING:
    from thinwire.node.cli.page.run_view import RunView
    from thinwire.node.peer.status import Status
    from thinwire.node.runtime.load_settings import Config


Port = Annotated[int, typer.Option("--port", min=0, max=65_535, help="Port of the page; 0: any free one.")]


class NoDaemonError(HintedError):
    """The command needs a running daemon, and none is running."""

    exit_code: ClassVar[int] = 4


class NoPageError(HintedError):
    """The page cannot be served here."""

    exit_code: ClassVar[int] = 3


def status(
    context: typer.Context,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers", help="Show only the peers: state, score, and the full reason of a ban, trial or suspicion."
        ),
    ] = False,
    json: Json = False,
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Show the status of this machine's daemon."""
    status, alive = _daemon(settings(context, debug, {"home": home}))
    if json:
        import msgspec

        shown = {"peers": status.peers if status else ()} if peers else {"status": status}
        sys.stdout.write(msgspec.json.encode({"running": alive, **shown}).decode() + "\n")
    if status is None or not alive:
        raise _none_here(status)
    if not json:
        from thinwire.node.peer.status_table import show, show_peers

        show_peers(status) if peers else show(status, time.time())


def top(
    context: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot as text, as without a terminal.")] = False,
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Show this machine's daemon on one screen.

    The screen shows the swarm, its links, the round and the events.
    """
    config = settings(context, debug, {"home": home})
    from thinwire.node.cli.page.run_view import RunView
    from thinwire.node.cli.top.loop import show

    if not show(RunView(config.directories), once=once):
        raise _none_here(None)


def logs(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines too, until Ctrl-C.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, max=MOST, help="Number of lines to print, the last ones.")
    ] = 50,
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Print the last lines of this machine's log."""
    from thinwire.node.cli.log_tail import tail

    path = settings(context, debug, {"home": home}).directories.log
    try:
        for line in tail(path, lines, follow=follow):
            sys.stdout.write(line)
            sys.stdout.flush()
    except FileNotFoundError:
        raise InputError(f"there is no log {path}", "start a daemon first, or name its directory with --home") from None
    except (IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "check its owner and mode, or --home") from None


def page(
    context: typer.Context,
    port: Port = 7380,
    host: Annotated[str, typer.Option("--host", help="Address of this machine to listen on.")] = "127.0.0.1",
    public: Annotated[
        bool, typer.Option("--hide-addresses", help="Leave out addresses; needed to serve other machines.")
    ] = False,
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Serve a page about the daemon of this machine.

    It has an API and metrics, too, and runs until Ctrl-C.
    """
    config = settings(context, debug, {"home": home})
    from thinwire.node.cli.page.run_view import RunView

    RunView(config.directories).status()  # files of another user are an error before the page is served
    _serve(lambda: RunView(config.directories, public=public), host, port, public)


def _serve(make_view: Callable[[], RunView], host: str, port: int, public: bool) -> None:
    if not public and not _is_loopback(host):
        raise InputError(
            f"a page on {host} would show the addresses of all peers to other machines",
            "add --hide-addresses, which leaves them out, or reach the page through a tunnel (ssh -L)",
        )
    try:
        from thinwire.node.cli.page.server import serve
    except ModuleNotFoundError as error:
        raise NotInstalled(f"the page needs the package {error.name}", "pip install 'thinwire[page]'") from None
    try:
        serve(make_view, host, port, public=public)
    except OSError as error:
        raise NoPageError(
            f"cannot listen on {host} port {port}: {error.strerror}",
            "choose another port with --port, 0 for any free one",
        ) from None


def replay(
    context: typer.Context,
    run: Annotated[
        str, typer.Argument(metavar="RUN", autocompletion=runs, help="The run, by its name or the start of its id.")
    ] = "",
    speed: Annotated[
        float,
        typer.Option("--speed", metavar="X", min=0.001, callback=finite, help="Speed, as a multiple of the real one."),
    ] = 60.0,
    first: Annotated[int, typer.Option("--round", metavar="N", min=0, max=MOST, help="Begin with this round.")] = 0,
    page: Annotated[bool, typer.Option("--page", help="Serve it as a page instead of a screen.")] = False,
    port: Port = 7380,
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Show a past run again, on a screen or as a page.

    The run is one of this machine; the screen is that of `top`.
    """
    config = settings(context, debug, {"home": home})
    from thinwire.node.cli.page.past_run import PastRun, past_clock

    directory, name = config.directories.only_run(run)
    clock = past_clock(directory, speed, first)
    if clock is None:
        raise InputError(
            f"run {name or directory.path.name} has no events", "its event log was removed, or it has not begun"
        )
    if page:
        _serve(lambda: PastRun(config.directories, directory, name, clock), "127.0.0.1", port, False)
        return
    from thinwire.node.cli.top.loop import show

    if not sys.stdout.isatty():
        clock.skip_to(clock.last)  # one snapshot: its end
    show(PastRun(config.directories, directory, name, clock), once=False)


def recover(
    context: typer.Context,
    run: Annotated[
        str, typer.Argument(metavar="RUN", autocompletion=runs, help="The run, by its name or the start of its id.")
    ] = "",
    now: Annotated[bool, typer.Option("--now", help="Continue now, and wait until it is done.")] = False,
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Show which peers would continue without a quorum.

    With --now, let them do so.
    """
    from thinwire.node.cli import recovery

    config = settings(context, debug, {"home": home})
    status = _running(config)
    if run not in ("", status.run_name) and not status.run.startswith(run.lower()):
        raise InputError(
            f"the daemon here trains {status.run_name or 'a run'} {status.run[:8]}, not {run!r}",
            "name that run or none, or give the directory of the other daemon with --home",
        )
    recovery.check(status)
    if not now:
        print(recovery.plan(status, time.time()))
        return
    print(recovery.recover(status, config.directories))


def invite(
    context: typer.Context,
    peer: Annotated[
        str, typer.Option("--for", metavar="PEER-ID", help="Admit this peer only; `thinwire id` prints its id there.")
    ] = "",
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="End of the admission of new peers, such as 12h or 7d.")
    ] = "",
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Print the command with which others join this run.

    The run is that of this machine's daemon.
    """
    config = settings(context, debug, {"home": home})
    status = _running(config)
    if not status.invite:
        if status.addresses:
            raise NoDaemonError("this peer may not invite others", "ask the author of the run for an invite")
        raise NoDaemonError("the daemon has no reachable address yet", "try again in a moment")
    from thinwire.node.cli.invitations import command, invitation

    try:
        until = int(time.time()) + seconds_of(expires) if expires else 0
        if until >= 1 << 32:
            raise ValueError(f"{expires} from now is after the year 2105")
    except ValueError as error:
        raise InputError(f"--expires: {error}", "write 12h or 7d, for example") from None
    code, serial = invitation(status, config.directories, peer, until)
    print(command(code, status, config.directories))
    from thinwire.node.runtime.console import warn
    from thinwire.swarm.identity.admission_token import expiry
    from thinwire.swarm.identity.invite import Invite

    invite = Invite.parse(code)
    if invite.note:
        warn(invite.note)
    end = expiry(invite.token)
    if end and (not until or end < until):
        warn(f"the invite ends {time.strftime('%Y-%m-%d %H:%M', time.localtime(end))}, with the token of this peer")
    if serial and sys.stderr is not None:
        print(f"to take it back: thinwire revoke {serial}", file=sys.stderr)


def revoke(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="ID", autocompletion=peers, help="Peer id, or serial of an invite.")],
    home: Home = None,
    debug: Debug = False,
) -> None:
    """Exclude a peer, or all peers of an invite, for good.

    Only the author of the run can. Peers that an excluded one has invited are excluded, too.
    """
    config = settings(context, debug, {"home": home})
    status, alive = _daemon(config)
    if status is None:
        raise _none_here(status)
    from thinwire.node.cli.invitations import revoked

    target = revoked(status, config.directories, target)
    when = "in a second" if alive else "at its next start"
    print(
        f"revoked {target}; the daemon spreads it {when}, and the next round is without it and the peers that it invited"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _daemon(config: Config) -> tuple[Status | None, bool]:
    from thinwire.node.peer.status import alive, read_status

    status = read_status(config.directories.status)
    return status, status is not None and alive(status, config.directories.lock)


def _running(config: Config) -> Status:
    """Return the status of the running daemon. Raises NoDaemonError if there is none."""
    status, alive = _daemon(config)
    if status is None or not alive:
        raise _none_here(status)
    return status


def _none_here(status: Status | None) -> NoDaemonError:
    message = "no daemon is running here"
    if status is not None:
        message += f"; the last one ended in round {status.round} of run {status.run_name or status.run[:8]}"
    return NoDaemonError(
        message, "start one with `thinwire start` or `thinwire join`, or give its directory with --home"
    )
