"""An SGLang server over HTTP, started here or elsewhere: the same interface as an engine in process."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import torch

from scaleup import cpu
from scaleup.rollout.engine import Engine
from scaleup.rollout.local import defaults


class HttpEngine(Engine):
    """An SGLang server at `url` (http://host:port) that serves the checkpoint `folder`, untouched
    until now.

    Raises RuntimeError for a status that is not 200, with the text of the reply.
    """

    def __init__(
        self,
        url: str,
        folder: str | Path,
        process: subprocess.Popen | None = None,
        exact: bool = True,
    ):
        self.url, self._process, self._session = url.rstrip("/"), process, None
        super().__init__(folder, dtype=torch.float32, tp=1, radix_cache=True, exact=exact)
        info = self._run("server_info")
        dtype = info["dtype"]
        if dtype == "auto":
            dtype = self.config.get("dtype") or self.config["torch_dtype"]
        self.dtype = getattr(torch, dtype)
        self.tp, self.radix_cache = info["tp_size"], not info["disable_radix_cache"]
        self.deterministic = info["enable_deterministic_inference"]
        self._check_start()

    async def _call(self, route, body):
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None),
                # SGLang closes a connection that idles for 5 s, as it does between two pushes
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
            )
        method = "GET" if route.endswith("_info") else "POST"
        async with self._session.request(method, f"{self.url}/{route}", json=body) as response:
            text, status = await response.text(), response.status
        try:
            reply = json.loads(text) if text else {}
        except json.JSONDecodeError:
            reply = {}
        if status != 200 and "success" not in reply:
            raise RuntimeError(f"rollout: {route} answered {status}: {text[:300]}")
        return reply

    def close(self):
        if self._session is not None:
            asyncio.run_coroutine_threadsafe(self._session.close(), self._loop).result()
        super().close()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()


def serve(
    folder: str | Path,
    dtype: str = "float32",
    exact: bool = True,
    timeout: float = 300.0,
    **options,
) -> HttpEngine:
    """Start a server for `folder` on a free port of this machine; `close()` ends it.

    Raises RuntimeError if it ends or is not up after `timeout` seconds.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    arguments = defaults(folder, dtype, host="127.0.0.1", port=port, **options)
    command = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in arguments.items():
        if value is not False and value is not None:
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    process = subprocess.Popen(command, env=os.environ | cpu.env())
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=10).close()
        except OSError:  # not up yet
            time.sleep(0.5)
        else:
            return HttpEngine(url, folder, process, exact)
    process.kill()
    raise RuntimeError(f"rollout: the server for {folder} did not start")
