"""The part of gpu_run.py with a server: load, answers under load, prompts of several clients in one step, the end."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_command import ROOT, Context, Document, attempt, kill_group, surroundings
from gpu_report import cell, last_line

CLIENTS = (16, 64, 256)
ORACLE = 384
PROMPTS, PROMPT_TOKENS, TRIES = 16, 64, 5
IDLE_S = 10.0
FLAGS = ("--device", "cuda", "--port", "0", "--max-batch", "256", "--max-queue", "512")
COLUMNS = {
    "completed": "completed", "errors": "errors", "pages_left": "pages left", "e2e_tok_s": "tokens/s",
    "ttft_p50": "TTFT p50, ms", "itl_p50": "ITL p50, ms",
}  # fmt: skip


class Server:
    """A running crucible-serve on 127.0.0.1. Raises RuntimeError when it is not up in ``timeout`` seconds."""

    def __init__(self, model: str, timeout: float, flags: Sequence[str] = FLAGS) -> None:
        command = ["-m", "crucible.server.cli", model, "--host", "127.0.0.1", *flags]
        print(f"$ python {' '.join(command)}", flush=True)
        self.url = ""
        self._lines: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=surroundings({}), text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            until(self._healthy, timeout, "the server was not up")
        except BaseException:
            self.kill()
            raise

    def _read(self) -> None:
        for line in self._process.stdout or ():
            print(line, end="", flush=True)
            self._lines.append(line)
            if "listening on http://" in line:
                self.url = line.split("listening on ")[1].split()[0]

    def _healthy(self) -> bool:
        if self._process.poll() is not None:
            self._reader.join(5)
            raise RuntimeError(f"the server ended with exit code {self._process.returncode}: {self.last_line()}")
        return bool(self.url) and ready(self.url)

    def last_line(self) -> str:
        return last_line("".join(self._lines))

    def stop(self, timeout: float = 60) -> int:
        """SIGTERM, and the exit code."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout)
        finally:
            self.kill()

    def kill(self) -> None:
        kill_group(self._process)
        self._process.wait()
        self._reader.join(5)


def until(reached: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Waits. Raises RuntimeError saying ``otherwise`` and how long it took."""
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            raise RuntimeError(f"{otherwise} after {seconds:g} s")
        time.sleep(0.05)


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:  # an HTTPError is one too: 503 until the engine is up
        return False


def ask(url: str, path: str, body: Any = None) -> dict[str, Any]:
    """The JSON of an answer. Raises OSError unless it is 200."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"} if data else {})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


# ---- the part


def serve(context: Context, *, flags: Sequence[str] = FLAGS, clients: Sequence[int] = CLIENTS) -> Document:
    """One server for all of it; each piece that fails is a result of its own."""
    results: list[Document] = []
    rows: list[list[str]] = []
    servers: list[Server] = []

    def start() -> tuple[bool, str]:
        begun = time.monotonic()
        servers.append(Server(context.model, context.timeout, flags))
        return True, f"ready after {time.monotonic() - begun:.1f} s"

    results.append(attempt(f"`crucible-serve {' '.join(flags)}`", start))
    if not servers:
        return {"results": results}
    server = servers[0]
    try:
        for count in clients:
            what = f"`crucible bench serve`, {count} clients, {4 * count:,} requests"
            results.append(attempt(what, partial(load, context, server.url, count, rows)))
        results.append(attempt(f"`scripts/test_serve.py --oracle {ORACLE}`", lambda: oracle(context, server.url)))
        what = f"{PROMPTS} clients at once, a prompt of {PROMPT_TOKENS} random tokens each"
        results.append(attempt(what, lambda: packing(server.url)))
        results.append(attempt("the server's end", lambda: end(server)))
    finally:
        server.kill()
    table = {"title": "`crucible bench serve`, closed loop", "columns": ["clients", *COLUMNS.values()], "rows": rows}
    return {"results": results, "tables": [table] if rows else []}


def load(context: Context, url: str, clients: int, rows: list[list[str]]) -> tuple[bool, str]:
    """4 requests a client; appends the table's row."""
    requests = 4 * clients
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "serve.json"
        words = ["bench", "serve", "--url", url, "--concurrency", str(clients), "--requests", str(requests)]
        code, output = context.run(
            ["-m", "crucible.cli", *words, "--trials", "1", "--json", str(path)], context.timeout
        )
        if code or not path.is_file():
            return False, last_line(output)
        found = json.loads(path.read_text(encoding="utf-8"))["tables"][0]["rows"][0]
    rows.append([str(clients), *(cell(found.get(key)) for key in COLUMNS)])
    values = {key: (found.get(key) or {}).get("median") for key in ("completed", "errors", "pages_left")}
    fine = values == {"completed": requests, "errors": 0, "pages_left": 0}
    completed, errors, left = (cell(value) for value in values.values())
    return fine, f"{completed} completed, {errors} errors, {left} pages left"


def oracle(context: Context, url: str) -> tuple[bool, str]:
    code, output = context.run(["scripts/test_serve.py", url, "--oracle", str(ORACLE)], context.timeout)
    lines = [line for line in output.splitlines() if ": " in line]
    failed = [line for line in lines if ": FAILED: " in line]
    found = [line for line in lines if line.startswith("answers under load")]
    if code or not found:
        return False, failed[0] if failed else last_line(output)
    return True, f"{len(lines)} checks; {found[0].partition(': ')[2]}"


def packing(url: str, tries: int = TRIES) -> tuple[bool, str]:
    """Whether prompts of different clients were computed in one step, by the server's counters.

    When requests arrive is a race, so there are ``tries``. The counters are those of the steps: the prompt tokens of
    the last one that had any, how many prompts came in how many chunks, and how many steps held several.
    """
    ids = ask(url, "/health")["vocab_size"] * 9 // 10  # the topmost may be padding
    draw = random.Random(time.time_ns())  # the prefix cache must not know them
    text = ""
    for _ in range(tries):
        before = ask(url, "/metrics")
        post_at_once(url, [[draw.randrange(ids) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)])
        after = ask(url, "/metrics")
        packed, prompts, tokens = (
            after[name] - before[name] for name in ("packed_calls", "prefill_chunks", "prefill_tokens")
        )
        last = after["last_prefill_chunk_tokens"]
        clients, rest = divmod(last, PROMPT_TOKENS)
        text = f"{last:,} prompt tokens in the last step, {packed} steps of several prompts"
        whole = (prompts, tokens) == (PROMPTS, PROMPTS * PROMPT_TOKENS)
        if packed > 0 and clients > 1 and not rest and whole:
            # With one such step the others had a prompt each; with more there is no telling.
            singles = PROMPTS - clients
            steps = f"with {packed} such steps" if packed > 1 else f"in {1 + singles} step{'s' if singles else ''}"
            return True, f"{last:,} prompt tokens of {clients} clients in one step; {PROMPTS} prompts {steps}"
    return False, f"not seen in {tries} tries; {text}"


def post_at_once(url: str, prompts: Sequence[Sequence[int]]) -> None:
    """Every prompt from a thread of its own, all sent together. Raises the first error."""
    barrier, errors = threading.Barrier(len(prompts)), []

    def client(prompt: Sequence[int]) -> None:
        try:
            barrier.wait(30)
            ask(url, "/v1/generate", {"prompt": prompt, "max_tokens": 2})
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def end(server: Server) -> tuple[bool, str]:
    """The pool of pages must be whole, and SIGTERM end the server with exit code 0."""
    used = active = -1

    def idle() -> bool:
        nonlocal used, active
        metrics = ask(server.url, "/metrics")
        used, active = metrics["kv_pages_used"], metrics["active_requests"]
        return not (used or active)

    whole, pool = True, "KV pool whole"
    try:
        until(idle, IDLE_S, "busy")
    except RuntimeError:
        whole, pool = False, f"{used} KV pages in use, {active} active requests"
    code = server.stop()
    return whole and code == 0, f"{pool}, exit code {code} after SIGTERM"
