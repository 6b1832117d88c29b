"""Compiles grammars of strangers: a process that forks once for each grammar, so that what explodes takes only the child with it.

Started by engine.grammars as `python -m engine.grammar_process FOLDER`; frames on stdin and stdout are four bytes of length and that much JSON. In: {id, kind,
text, cpu_s, memory_bytes, result_bytes}. Out: {id, grammar} or {id, error}. Invariants: one answer for every question; a child cannot use more processor time
or memory than its question says; the process ends when stdin closes, and sleeps while there is nothing to do.
"""

import json
import os
import resource
import selectors
import signal
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xgrammar

from engine.grammar import parse_grammar, vocabulary
from engine.tokenizer import Tokenizer
from protocol.errors import InvalidRequest

TRIAL_WALKS, TRIAL_TOKENS = 3, 24
STEP_LIMIT_S = 0.05  # processor time of one mask, or of one look for forced tokens: more would hold up the answers of others
NICENESS = 5  # below the step loop, with which it may share a core
WALL_FACTOR = 6  # wall time that a child may take on a busy machine, in terms of its processor time
HEADER = struct.Struct("<I")


@dataclass
class Child:
    """One question under way."""

    question: dict[str, Any]
    pid: int
    until: float
    output: bytearray = field(default_factory=bytearray)


def main(folder: Path) -> None:
    os.nice(NICENESS)
    info = vocabulary(Tokenizer(folder))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    answers, sys.stdout = os.fdopen(os.dup(1), "wb"), sys.stderr
    os.dup2(2, 1)  # whatever a library prints is no frame
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    children: dict[int, Child] = {}
    while True:
        nearest = min((child.until for child in children.values()), default=None)
        for key, _ in selector.select(None if nearest is None else max(0.0, nearest - time.monotonic())):
            if key.fd == 0:
                question = _read_frame(0)
                if question is None:
                    _end(children)
                    return
                reader = _fork(question, compiler, info, children)
                selector.register(reader, selectors.EVENT_READ)
            elif part := os.read(key.fd, 1 << 16):
                children[key.fd].output += part
            else:
                selector.unregister(key.fd)
                os.close(key.fd)
                answers.write(_framed(_answer(children.pop(key.fd))))
                answers.flush()
        for child in children.values():
            if child.until <= time.monotonic():
                os.kill(child.pid, signal.SIGKILL)  # its pipe closes, and that ends it here
                child.until = float("inf")


def _fork(question: dict[str, Any], compiler: xgrammar.GrammarCompiler, info: xgrammar.TokenizerInfo, children: dict[int, Child]) -> int:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(0)
            _limit(question)
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(json.dumps(_compile(question, compiler, info)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    children[reader] = Child(question, pid, time.monotonic() + question["cpu_s"] * WALL_FACTOR)
    return reader


def _limit(question: dict[str, Any]) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + question["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (question["cpu_s"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _compile(question: dict[str, Any], compiler: xgrammar.GrammarCompiler, info: xgrammar.TokenizerInfo) -> dict[str, str]:
    try:
        compiled = compiler.compile_grammar(parse_grammar(question["kind"], question["text"]))
        _try_out(compiled, info, question["kind"])
        serialised = compiled.serialize_json()
    except InvalidRequest as error:
        return {"error": error.message}
    except (MemoryError, RuntimeError) as error:
        log_line = str(error).strip().splitlines()[-1:] or ["MemoryError"]
        return {"error": f"{question['kind']}: too complex: {log_line[0][:200].replace('std::bad_alloc', 'too much memory')}"}
    if len(serialised) > question["result_bytes"]:
        return {"error": f"{question['kind']}: too large once compiled: {len(serialised)} bytes, at most {question['result_bytes']}"}
    return {"grammar": serialised}


def _try_out(compiled: xgrammar.CompiledGrammar, info: xgrammar.TokenizerInfo, kind: str) -> None:
    """Follow it for some tokens: no step may be slow, and something must be allowed."""
    mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    random = np.random.default_rng(0)
    for _ in range(TRIAL_WALKS):
        matcher = xgrammar.GrammarMatcher(compiled)
        for _ in range(TRIAL_TOKENS):
            started = time.process_time()
            matcher.fill_next_token_bitmask(mask)
            matcher.find_jump_forward_string()
            if time.process_time() - started > STEP_LIMIT_S:
                raise InvalidRequest(f"{kind}: too ambiguous to be followed token by token")
            allowed = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8)[0], bitorder="little"))
            if not len(allowed):
                raise InvalidRequest(f"{kind}: no text of this model's tokens matches it")
            matcher.accept_token(int(random.choice(allowed)))
            if matcher.is_terminated():
                break


def _answer(child: Child) -> dict[str, Any]:
    _, status = os.waitpid(child.pid, 0)
    kind = child.question["kind"]
    answer: dict[str, Any] = {}
    if os.WIFEXITED(status) and child.output:
        answer = json.loads(child.output)
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        answer = {"error": f"{kind}: too complex: not compiled within {child.question['cpu_s']} s"}
    else:
        answer = {"error": f"{kind}: too complex: too much memory or nesting"}
    return {"id": child.question["id"], **answer}


def _end(children: dict[int, Child]) -> None:
    for child in children.values():
        os.kill(child.pid, signal.SIGKILL)


def _framed(message: dict[str, Any]) -> bytes:
    content = json.dumps(message).encode()
    return HEADER.pack(len(content)) + content


def _read_frame(fd: int) -> dict[str, Any] | None:
    """None at the end of the stream."""
    header = _read_exactly(fd, HEADER.size)
    content = _read_exactly(fd, HEADER.unpack(header)[0]) if header else b""
    return json.loads(content) if content else None


def _read_exactly(fd: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(fd, size - len(parts))
        if not part:
            return b""
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
