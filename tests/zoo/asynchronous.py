"""Run an event loop that SIGINT interrupts."""
import asyncio
import os
import signal


async def main():
    asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGINT)
    try:
        await asyncio.sleep(60)
    finally:
        print("cleaned up", flush=True)


asyncio.run(main())
