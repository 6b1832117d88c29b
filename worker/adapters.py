"""LoRA adapters of one worker: read from its disk beside the event loop, handed to the engine, taken away again. Knows nothing of requests or routers.

Invariant: every call is answered once, at its deadline at the latest.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.adapters import Done
from engine.config import EngineConfig
from engine.engine import Engine
from engine.lora import Adapter, load_adapter
from engine.model_config import ModelConfig
from protocol import headrace_pb2 as pb
from protocol.errors import ConfigError, DeadlineExceeded, HeadraceError

log = logging.getLogger(__name__)


class AdapterReader:
    """From PEFT folders, for one model. Raises InvalidRequest."""

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self._model = model
        self._config = config

    def read(self, name: str, path: str) -> Adapter:
        return load_adapter(name, Path(path), self._model, getattr(torch, self._config.dtype), self._config.lora.max_rank)

    def configured(self) -> list[Adapter]:
        """Those that the configuration names. Raises ConfigError."""
        try:
            return [self.read(name, path) for name, path in self._config.lora.adapters.items()]
        except HeadraceError as error:
            raise ConfigError(f"engine.lora.adapters: {error.message}", field="engine.lora.adapters") from error


class AdapterService:
    """What the data plane asks for."""

    def __init__(self, engine: Engine, reader: AdapterReader) -> None:
        self._engine = engine
        self._reader = reader

    async def answer(self, message: pb.LoadAdapter | pb.UnloadAdapter) -> pb.AdapterReply:
        try:
            async with asyncio.timeout(max(0.0, message.deadline - time.time())):
                await (self._load(message) if isinstance(message, pb.LoadAdapter) else self._unload(message))
        except TimeoutError:
            words = "it took too long to read" if isinstance(message, pb.LoadAdapter) else "sequences still use it; new ones are refused already"
            return _reply(message.call, DeadlineExceeded(f"adapter {message.name!r}: {words}"))
        except HeadraceError as error:
            return _reply(message.call, error)
        except Exception as error:  # whatever a folder can do, the caller must hear of it
            log.exception("adapter %s", message.name)
            return _reply(message.call, HeadraceError(f"adapter {message.name!r}: {error}"))
        log.info("adapter %s %s", message.name, "loaded" if isinstance(message, pb.LoadAdapter) else "unloaded")
        return _reply(message.call, None)

    async def _load(self, message: pb.LoadAdapter) -> None:
        adapter = await asyncio.to_thread(self._reader.read, message.name, message.path)
        await _done(lambda done: self._engine.load_adapter(adapter, done))

    async def _unload(self, message: pb.UnloadAdapter) -> None:
        await _done(lambda done: self._engine.unload_adapter(message.name, done))


async def _done(command: Callable[[Done], None]) -> None:
    """Wait until the engine is through with a command; raises what speaks against it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[HeadraceError | None] = loop.create_future()

    def settle(error: HeadraceError | None) -> None:
        if not future.done():
            future.set_result(error)

    def done(error: HeadraceError | None) -> None:
        loop.call_soon_threadsafe(settle, error)

    command(done)
    error = await future
    if error is not None:
        raise error


def _reply(call: int, error: HeadraceError | None) -> pb.AdapterReply:
    return pb.AdapterReply(call=call) if error is None else pb.AdapterReply(call=call, error_code=error.code, error_message=error.message)
