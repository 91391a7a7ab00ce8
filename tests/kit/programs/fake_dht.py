"""Child of the pipe protocol without a DHT: fake_dht.py FOLDER [FAULT]. It stores its values in memory.

Each start writes its options to a new file in FOLDER. The first start has the FAULT; with "always-" before it, all starts have.

- "dies": the child ends at the first request.
- "silent": it gives no answer. "noise": it writes other bytes instead. "oversized": it states too large a length.
- "nested": its JSON is nested deeply.
- "error": it reports an error when it opens. "failing": it reports one at each request.
- "lost": no bootstrap node answers the second to fourth request to reach them.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

folder, fault = Path(sys.argv[1]), "".join(sys.argv[2:])
lives = len(list(folder.iterdir()))
if lives and not fault.startswith("always-"):
    fault = ""
fault = fault.removeprefix("always-")


def read():
    head = sys.stdin.buffer.read(4)
    return json.loads(sys.stdin.buffer.read(int.from_bytes(head, "big"))) if len(head) == 4 else None


def write(data):
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def send(**message):
    data = json.dumps(message).encode()
    write(len(data).to_bytes(4, "big") + data)


options = read()
(folder / f"{lives:03d}").write_text(json.dumps({**options, "process": os.getpid(), "at": time.monotonic()}))
if fault == "error":
    send(error="no bootstrap node answers")
    sys.exit(0)
send(addresses=["/ip4/127.0.0.1/tcp/1/p2p/me"])
stored, reaches = {}, 0
while (request := read()) is not None:
    if fault == "dies":
        signal.raise_signal(signal.SIGSEGV)
    elif fault == "silent":
        time.sleep(1000)
    elif fault == "noise":
        write((8).to_bytes(4, "big") + b"\xff" * 8)
    elif fault == "oversized":
        write(b"\xff\xff\xff\xff")
    elif fault == "nested":
        write((200_000).to_bytes(4, "big") + b"[" * 200_000)
    elif fault == "failing":
        send(id=request["id"], error="ConnectionRefusedError: [Errno 111] Connection refused")
    elif request["do"] == "reach":
        reaches += 1
        lost = fault == "lost" and 1 < reaches < 5
        send(id=request["id"], reached=not lost)
    elif request["do"] == "store":
        stored.setdefault(request["key"], {})[request["subkey"]] = request["value"]
        send(id=request["id"], stored=True)
    elif request["do"] == "get":
        send(id=request["id"], values=list(stored.get(request["key"], {}).values()))
    else:
        send(id=request["id"], peers=["/ip4/192.0.2.9/tcp/9/p2p/other"])
