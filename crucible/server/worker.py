"""An http worker: Falcon on waitress over one engine client. Imports no kernels and no model."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading

from crucible.engine.client import EngineClient
from crucible.engine.control import Control, load_object
from crucible.engine.messages import Failed, Serving
from crucible.errors import CrucibleError
from crucible.server.app import create_app
from crucible.server.http import HttpServer

TEXT_FACTORY = "crucible.server.text:CheckpointText"


def run_worker(
    control: socket.socket,
    *,
    listener: socket.socket,
    engine_path: str,
    model_path: str,
    model_id: str,
    streams: int,
    stalled_s: float,
    text_factory: str = TEXT_FACTORY,
) -> None:
    """Entry point of the child: serve ``listener`` until told to drain.

    engine_path: where the engine listens. streams: most requests the engine holds (max_batch + max_queue).
    stalled_s: a step that takes longer makes the service unhealthy.
    text_factory: ``module:name``, called with the model's path.
    """
    logging.basicConfig(format="crucible-serve: %(levelname)s: %(message)s")
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # queued tasks are our design, not a warning
    line = Control(control)
    draining = threading.Event()
    try:
        text = load_object(text_factory)(model_path)
    except CrucibleError as error:
        line.report(Failed(str(error)))
        sys.exit(1)
    client = EngineClient(engine_path)
    server = HttpServer(create_app(client, text, model_id, draining.is_set, stalled_s), listener, streams)

    def drain() -> None:
        draining.set()
        server.stop_accepting()
        leave = (lambda: os._exit(0),)
        threading.Thread(target=server.leave_when_idle, args=leave, name="drain", daemon=True).start()

    def report_when_ready() -> None:
        client.wait_ready()
        line.report(Serving())

    line.watch(drain)
    threading.Thread(target=report_when_ready, name="ready", daemon=True).start()
    server.run()
