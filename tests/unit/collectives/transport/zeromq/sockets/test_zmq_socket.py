"""A libzmq socket on the event loop."""

from __future__ import annotations

import asyncio
import socket

import pytest
import zmq
from thinwire.collectives.transport.zeromq.sockets.zmq_socket import GREETING, OPENING, ZmqSocket, begins_handshake


class Full:
    """Socket that reports room and then has none, like libzmq in the middle of a multipart message."""

    def __init__(self):
        self.ends, self.closed = socket.socketpair(), None

    def getsockopt(self, option):
        return self.ends[0].fileno() if option == zmq.FD else zmq.POLLOUT

    def send(self, data, flags=0):
        raise zmq.Again()

    def close(self, linger=None):
        self.closed = linger
        for end in self.ends:
            end.close()


def test_socket_closes_even_if_last_message_does_not_fit():
    async def work():
        sock = Full()
        ZmqSocket(sock, lambda frames: None).finish(b"bye", 1000)
        assert sock.closed == 1000

    asyncio.run(work())


def test_message_whose_connection_is_lost_between_two_parts_waits_and_is_sent_whole_later():
    class Lost(Full):
        def __init__(self):
            super().__init__()
            self.sent, self.failures = [], 1

        def send_multipart(self, parts, flags=0):
            if self.failures:
                self.failures -= 1
                raise zmq.Again()
            self.sent.append(parts)

    async def work():
        sock = Lost()
        channel = ZmqSocket(sock, lambda frames: None)
        assert not channel.post((b"head", b"body")) and sock.sent == []
        assert channel.post((b"next",)) and sock.sent == [(b"head", b"body"), (b"next",)]
        channel.close()

    asyncio.run(work())


def opening_of_libzmq() -> tuple[bytes, bytes]:
    """Return the greeting of a CURVE server, and the first bytes of a client."""
    context = zmq.Context()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        public, secret = zmq.curve_keypair()
        server, client = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        for one in (server, client):
            one.curve_publickey, one.curve_secretkey = public, secret
        server.curve_server, client.curve_serverkey = True, public
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        with socket.create_connection(("127.0.0.1", port)) as near, listener.accept()[0] as far:
            for end in (near, far):
                end.settimeout(10)
            near.sendall(GREETING[:11])
            theirs = b""
            while len(theirs) < len(GREETING):
                theirs += near.recv(len(GREETING) - len(theirs))
            far.sendall(GREETING)
            said = b""
            while len(said) < OPENING:
                said += far.recv(4096)
    context.destroy(linger=0)
    return theirs, said


def test_greeting_is_that_of_libzmq_and_a_handshake_begins_with_the_whole_hello():
    theirs, said = opening_of_libzmq()
    assert theirs == GREETING and len(said) == OPENING
    assert [begins_handshake(said[:length]) for length in range(OPENING + 1)] == [False] * OPENING + [True]
    assert begins_handshake(said + b"more")


@pytest.mark.parametrize("at", [0, 9, 10, 12, 31, 32, 64, 65, 66, 72, 74, 145])
def test_other_greetings_and_commands_begin_no_handshake(at):
    _, said = opening_of_libzmq()
    wrong = said[:at] + bytes([2 if at == 10 else said[at] ^ 0x80]) + said[at + 1 :]
    assert not begins_handshake(wrong[:at])
    with pytest.raises(ValueError):
        begins_handshake(wrong)
