"""Router that maps ports by NAT-PMP, PCP and UPnP, for tests; its mappings are rules of nftables, or only recorded.

    python router.py ADDRESS OUTSIDE MODE [HOST]

It listens on ADDRESS and reports OUTSIDE as its outside address. MODE: "nat-pmp", "pcp", "upnp",
"garbage", "garbage-pcp" or "other-port".
With HOST, TCP that arrives for a mapped port is forwarded there. Each change prints a line "map PORT SECONDS" or
"unmap PORT".
"""

from __future__ import annotations

import re
import socket
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
ROOT = "root"
DESCRIPTION = f"""<?xml version="1.0"?><{ROOT} xmlns="urn:schemas-upnp-org:device-1-0"><specVersion><major>1</major>
<minor>0</minor></specVersion><device><deviceType>{DEVICE}</deviceType><friendlyName>r</friendlyName>
<manufacturer>m</manufacturer><modelName>m</modelName><UDN>uuid:1</UDN><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><friendlyName>w</friendlyName><UDN>uuid:2</UDN>
<serviceList><service><serviceType>urn:schemas-upnp-org:service:WANCommonInterfaceConfig:1</serviceType>
<serviceId>urn:upnp-org:serviceId:WANCommonIFC1</serviceId><controlURL>/c</controlURL><eventSubURL>/e</eventSubURL>
<SCPDURL>/s</SCPDURL></service></serviceList><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><friendlyName>c</friendlyName><UDN>uuid:3</UDN>
<serviceList><service><serviceType>{SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<controlURL>/c</controlURL><eventSubURL>/e</eventSubURL><SCPDURL>/s</SCPDURL></service></serviceList></device>
</deviceList></device></deviceList></device></{ROOT}>"""
GROUP = "239.255.255.250"


class Router:
    """Mappings of one router: outside port -> inside host and port."""

    def __init__(self, address: str, outside: str, mode: str, host: str) -> None:
        self.address, self.outside, self.mode, self.host = address, outside, mode, host
        self.mapped: dict[int, tuple[object, ...]] = {}

    def map(self, port: int, inside: tuple[object, ...], seconds: int) -> None:
        if self.host and port not in self.mapped:
            rule = f'add rule ip nat before iifname "eth0" tcp dport {port} dnat to {self.host}:{inside[1]}'
            subprocess.run(["nft", rule], check=True)
        self.mapped[port] = inside
        print(f"map {port} {seconds}", flush=True)

    def unmap(self, port: int) -> bool:
        known = self.mapped.pop(port, None) is not None
        if known:
            print(f"unmap {port}", flush=True)
        if known and self.host:
            subprocess.run(["nft", "flush chain ip nat before"], check=True)
            for one, inside in self.mapped.items():
                rule = f'add rule ip nat before iifname "eth0" tcp dport {one} dnat to {self.host}:{inside[1]}'
                subprocess.run(["nft", rule], check=True)
        return known

    # --- NAT-PMP

    def nat_pmp(self, port: int) -> None:
        """Answer packets on a UDP port, until the process ends."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind((self.address, port))
        print(f"listening {sock.getsockname()[1]}", flush=True)
        while True:
            data, sender = sock.recvfrom(2048)
            for answer in self.answers(data, sender[0]):
                sock.sendto(answer, sender)

    def answers(self, data: bytes, sender: str) -> list[bytes]:
        if self.mode == "garbage":
            return [b"", b"\x00", bytes(4), b"\xff" * 12, bytes(1000), struct.pack(">BBHI", 0, 130, 0, 0)]
        if data[0] == 2:
            return self.pcp(data, sender)
        if data == b"\0\0":
            return [struct.pack(">BBHI", 0, 128, 0, 1) + socket.inet_aton(self.outside)]
        _, _, _, inside, port, seconds = struct.unpack(">BBHHHI", data)
        if seconds:
            port += self.mode == "other-port" and inside % 2
            self.map(port, (sender, inside), seconds)
        else:
            for one in [one for one, where in self.mapped.items() if where == (sender, inside)]:
                self.unmap(one)
            port = 0
        return [struct.pack(">BBHIHHI", 0, 130, 0, 1, inside, port, seconds)]

    def pcp(self, data: bytes, sender: str) -> list[bytes]:
        if self.mode in ("nat-pmp", "other-port"):  # Such a router does not know the version.
            return [struct.pack(">BBHI", 0, 128 + data[1], 1, 1)]
        _, _, seconds, client = struct.unpack(">BBxxI16s", data[:24])
        nonce, protocol, inside, port, _ = struct.unpack(">12sBxxxHH16s", data[24:])
        outside = bytes(10) + b"\xff\xff" + socket.inet_aton(self.outside)

        def answer(result: int, lease: int, nonce: bytes, port: int) -> bytes:
            head = struct.pack(">BBBBII12x", 2, 129, 0, result, lease, 1)
            return head + struct.pack(">12sBxxxHH16s", nonce, protocol, inside, port, outside)

        if self.mode == "garbage-pcp":
            other, cut = answer(0, seconds, bytes(12), port), answer(0, seconds, nonce, port)
            return [b"\2", bytes(3), b"\2\x81", other, cut[:59], cut[:24], b"\2\x82" + cut[2:], cut + bytes(1100)]
        if client != bytes(10) + b"\xff\xff" + socket.inet_aton(sender):
            return [answer(12, seconds, nonce, port)]
        where = (sender, inside, nonce)
        if self.mode == "short-lease":
            return [answer(0, 1, nonce, port)]
        if seconds:
            self.map(port, where, seconds)
        else:
            for one in [one for one, known in self.mapped.items() if known == where]:
                self.unmap(one)
        return [answer(0, seconds, nonce, port)]

    # --- UPnP

    def upnp(self) -> None:
        """Answer searches and requests, until the process ends."""
        router = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                pass

            def reply(self, code: int, body: str) -> None:
                data = b"\0<<<not xml" * 99 if router.mode == "garbage" else body.encode()
                self.send_response(code)
                self.send_header("Content-Type", "text/xml")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self.reply(200, DESCRIPTION)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                action = self.headers["SOAPAction"].strip('"').rpartition("#")[2]
                values = dict(re.findall(r"<(\w+)>([^<]*)</\1>", body))
                code, said = router.act(action, values)
                kind = "Response" if code == 200 else ""
                inner = f'<u:{action}{kind} xmlns:u="{SERVICE}">{said}</u:{action}{kind}>' if code == 200 else said
                self.reply(
                    code,
                    '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>'
                    f"{inner}</s:Body></s:Envelope>",
                )

        web = ThreadingHTTPServer((self.address, 0), Handler)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((GROUP, 1900))
        sock.setsockopt(
            socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(GROUP) + socket.inet_aton(self.address)
        )
        print("listening 1900", flush=True)
        where = f"http://{self.address}:{web.server_address[1]}/d.xml"
        while True:
            data, sender = sock.recvfrom(2048)
            if b"M-SEARCH" in data and DEVICE.encode() in data:
                answer = f"HTTP/1.1 200 OK\r\nLOCATION: {where}\r\nST: {DEVICE}\r\nUSN: uuid:1::{DEVICE}\r\n\r\n"
                sock.sendto(answer.encode(), sender)

    def act(self, action: str, values: dict[str, str]) -> tuple[int, str]:
        """Perform one action; return the status and the content of the answer."""
        port = int(values.get("NewExternalPort", 0))
        if action == "GetStatusInfo":
            status = "<NewConnectionStatus>Connected</NewConnectionStatus>"
            return 200, f"{status}<NewLastConnectionError>ERROR_NONE</NewLastConnectionError><NewUptime>9</NewUptime>"
        if action == "GetExternalIPAddress":
            return 200, f"<NewExternalIPAddress>{self.outside}</NewExternalIPAddress>"
        if action == "GetSpecificPortMappingEntry" and port in self.mapped:
            host, inside = self.mapped[port][:2]
            enabled = "<NewEnabled>1</NewEnabled><NewPortMappingDescription>t</NewPortMappingDescription>"
            client = f"<NewInternalPort>{inside}</NewInternalPort><NewInternalClient>{host}</NewInternalClient>"
            return 200, f"{client}{enabled}<NewLeaseDuration>9</NewLeaseDuration>"
        if action == "AddPortMapping":
            self.map(
                port, (values["NewInternalClient"], int(values["NewInternalPort"])), int(values["NewLeaseDuration"])
            )
            return 200, ""
        if action == "DeletePortMapping" and self.unmap(port):
            return 200, ""
        fault = '<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>714</errorCode></UPnPError>'
        return 500, f"<s:Fault><faultcode>s:Client</faultcode><detail>{fault}</detail></s:Fault>"


if __name__ == "__main__":
    address, outside, mode, *rest = sys.argv[1:]
    router = Router(address, outside, mode.removesuffix("-upnp"), rest[0] if rest and not rest[0].isdigit() else "")
    if "upnp" in mode:
        router.upnp()
    else:
        router.nat_pmp(int(rest[0]) if rest and rest[0].isdigit() else 5351)
