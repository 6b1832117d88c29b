"""Compiled grammars: from the cache, or from the compiler's process. Owns both and the limits of a compilation; knows nothing of sequences.

Invariants: a grammar of a stranger is never compiled in this process; one text is compiled once at a time, whoever asks; the cache stays within its bytes.
"""

import json
import logging
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

import xgrammar

from engine.grammar import vocabulary
from engine.grammar_process import HEADER
from engine.tokenizer import Tokenizer
from protocol.errors import InvalidRequest, Unavailable
from protocol.request import Grammar

log = logging.getLogger(__name__)

CPU_S = 4  # of one compilation; a whole number, as the kernel counts it
MEMORY_BYTES = 1024**3  # on top of what the compiler's process has mapped
RESULT_BYTES = 32 * 1024**2  # serialised
CLOSE_S = 1.0
ANSWER_S = 60.0  # for an answer of the process, which has a limit of its own; whoever waits has the request's deadline


class Grammars:
    """`compile` may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer, cache_bytes: int) -> None:
        self._info = vocabulary(tokenizer)
        self._process = CompilerProcess(str(tokenizer.folder))
        self._cache_bytes = cache_bytes
        self._compiled: OrderedDict[Grammar, xgrammar.CompiledGrammar] = OrderedDict()
        self._bytes = 0
        self._under_way: dict[Grammar, Future[xgrammar.CompiledGrammar]] = {}
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Blocks. Raises InvalidRequest where the grammar is wrong or costs too much, Unavailable where the compiler's process is gone."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
            known = self._under_way.get(grammar)
            mine: Future[xgrammar.CompiledGrammar] = known or Future()
            self._under_way[grammar] = mine
        if known is not None:
            return known.result(ANSWER_S)
        try:
            compiled = xgrammar.CompiledGrammar.deserialize_json(self._process.ask(grammar), self._info)
            self._keep(grammar, compiled)
            mine.set_result(compiled)
            return compiled
        except Exception as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._under_way[grammar]

    @property
    def cached_bytes(self) -> int:
        return self._bytes

    def close(self) -> None:
        self._process.close()

    def _keep(self, grammar: Grammar, compiled: xgrammar.CompiledGrammar) -> None:
        size = compiled.memory_size_bytes + len(grammar.text)
        if size > self._cache_bytes:
            return
        with self._lock:
            self._compiled[grammar] = compiled
            self._bytes += size
            while self._bytes > self._cache_bytes:
                oldest, dropped = self._compiled.popitem(last=False)
                self._bytes -= dropped.memory_size_bytes + len(oldest.text)


class CompilerProcess:
    """The process of engine.grammar_process, started with the first question and again after its death."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._questions: dict[int, tuple[subprocess.Popen[bytes], Future[str]]] = {}
        self._last_id = 0
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._closed = False

    def ask(self, grammar: Grammar) -> str:
        """The compiled grammar, serialised."""
        limits = {"cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES, "result_bytes": RESULT_BYTES}
        answer: Future[str] = Future()
        with self._lock:
            if self._closed:
                raise Unavailable("the grammar compiler is closed")
            process = self._alive()
            self._last_id += 1
            name = self._last_id
            self._questions[name] = process, answer
        content = json.dumps({"id": name, "kind": grammar.kind, "text": grammar.text, **limits}).encode()
        self._write(process, HEADER.pack(len(content)) + content)
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            raise Unavailable("the grammar compiler does not answer") from None

    def _write(self, process: subprocess.Popen[bytes], frame: bytes) -> None:
        """Not under the lock that the reading thread needs: the process may want its answers read before it reads on."""
        assert process.stdin is not None
        with self._writing:
            try:
                process.stdin.write(frame)
                process.stdin.flush()
            except (OSError, ValueError) as error:
                raise Unavailable(f"the grammar compiler is gone: {error}") from error

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
                try:
                    self._process.wait(CLOSE_S)
                except subprocess.TimeoutExpired:  # perhaps it has not come to its first question yet
                    self._process.kill()
                    self._process.wait()

    def _alive(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "engine.grammar_process", self._folder]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            threading.Thread(target=self._read, args=(self._process,), name="grammar-answers", daemon=True).start()
        return self._process

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        while header := process.stdout.read(HEADER.size):
            answer: dict[str, Any] = json.loads(process.stdout.read(HEADER.unpack(header)[0]))
            with self._lock:
                _, question = self._questions.pop(answer["id"], (process, None))
            if question is None:
                continue
            if "grammar" in answer:
                question.set_result(answer["grammar"])
            else:
                question.set_exception(InvalidRequest(answer["error"]))
        with self._lock:
            lost = [self._questions.pop(name)[1] for name, (asked, _) in list(self._questions.items()) if asked is process]
        if lost:
            log.warning("the grammar compiler ended with %d questions open", len(lost))
        for question in lost:
            question.set_exception(Unavailable("the grammar compiler is gone"))
