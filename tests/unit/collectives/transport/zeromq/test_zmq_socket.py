"""A libzmq socket on the event loop."""

from __future__ import annotations

import asyncio
import socket

import zmq
from thinwire.collectives.transport.zeromq.zmq_socket import ZmqSocket


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
