"""The function NAME: a SOCKS5 proxy (RFC 1928) that sees every byte of every flow.

Change `to_server` and `to_client`. Each is made anew for a flow, so it may keep state of that flow; called with bytes as they
come (cut anywhere) it returns what goes on in their place, and called with b"" at the end what is to go before the end.
Raise Refused to end a flow. There is no network in the container: the destination is the way back to sidetrack.
"""

import asyncio
import os
import struct


class Refused(Exception):
    """The flow may not go on."""


class ToServer:
    def __call__(self, data: bytes) -> bytes:
        return data


class ToClient:
    def __call__(self, data: bytes) -> bytes:
        return data


async def request(reader, writer):
    """The handshake; gives the destination."""
    version, methods = await reader.readexactly(2)
    offered = await reader.readexactly(methods)
    if version != 5 or 0 not in offered:
        writer.write(b"\x05\xff")
        raise Refused("no SOCKS5 without authentication")
    writer.write(b"\x05\x00")
    version, command, _, kind = await reader.readexactly(4)
    if kind == 1:
        host = ".".join(str(byte) for byte in await reader.readexactly(4))
    elif kind == 3:
        host = (await reader.readexactly((await reader.readexactly(1))[0])).decode("ascii")
    else:
        writer.write(b"\x05\x08\x00\x01" + bytes(6))
        raise Refused("an address of a type that is not served")
    (port,) = struct.unpack("!H", await reader.readexactly(2))
    if command != 1:
        writer.write(b"\x05\x07\x00\x01" + bytes(6))
        raise Refused("not a CONNECT")
    return host, port


async def move(reader, writer, change):
    """One direction, to its end; the other goes on."""
    while True:
        data = await reader.read(65536)
        changed = change(data)
        if changed:
            writer.write(changed)
            await writer.drain()
        if not data:
            writer.write_eof()
            return


async def flow(reader, writer):
    onward = None
    try:
        host, port = await request(reader, writer)
        try:
            server, onward = await asyncio.open_connection(host, port)
        except OSError:
            writer.write(b"\x05\x05\x00\x01" + bytes(6))
            return
        writer.write(b"\x05\x00\x00\x01" + bytes(6))
        up = asyncio.create_task(move(reader, onward, ToServer()))
        down = asyncio.create_task(move(server, writer, ToClient()))
        done, others = await asyncio.wait([up, down], return_when=asyncio.FIRST_EXCEPTION)
        for other in others:
            other.cancel()
        for one in done:
            one.result()
    except (Refused, OSError, asyncio.IncompleteReadError) as error:
        print("a flow ended:", error, flush=True)
        if onward is not None:
            onward.transport.abort()
    finally:
        writer.close()
        if onward is not None:
            onward.close()


async def main():
    port = int(os.environ.get("PORT", "1080"))
    proxy = await asyncio.start_server(flow, "127.0.0.1", port)
    print("listening on", proxy.sockets[0].getsockname()[1], flush=True)
    await proxy.serve_forever()


asyncio.run(main())
