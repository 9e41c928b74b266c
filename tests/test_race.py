"""The race this project answers, and its cure: python -m pytest tests/test_race.py"""

import multiprocessing
import threading

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

PINNED = (2, 13)
MESSAGE = "FX to symbolically trace a dynamo-optimized function"


def trace(done, started=None):
    """Trace over and over, as a compilation does, until told to stop."""
    if started is not None:
        started.set()
    while not done.is_set():
        make_fx(lambda x: x.sin() + x.cos())(torch.randn(8))


def call_compiled(calls):
    """Call an already compiled function `calls` times -> the messages of the calls that refused."""
    compiled = torch.compile(lambda x: x * 2 + 1, backend="aot_eager", fullgraph=True)
    x, refused = torch.randn(8), []
    with torch.no_grad():
        compiled(x)
        yield "compiled"
        for _ in range(calls):
            try:
                compiled(x)
            except RuntimeError as e:
                refused.append(str(e))
    yield refused


def test_tracing_in_one_thread_makes_a_compiled_call_in_another_refuse():
    """Shows the fault that drafters as threads would meet on the pinned torch; where a later torch passes
    this, say so."""
    version = tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
    if version > PINNED:
        pytest.skip(
            f"torch {torch.__version__} made the tracing flag thread-local; other races stay (#136833)"
        )
    calls, done = call_compiled(2000), threading.Event()
    next(calls)
    tracer = threading.Thread(target=trace, args=(done,))
    tracer.start()
    try:
        refused = next(calls)
    finally:
        done.set()
        tracer.join()
    assert len(refused) > 100 and all(MESSAGE in m for m in refused)


def test_tracing_in_another_process_never_does():
    """Catches a return of the race: the same work in a process of its own, as every drafter is, refuses no
    call."""
    context = multiprocessing.get_context("spawn")
    done, started = context.Event(), context.Event()
    calls = call_compiled(20000)
    next(calls)
    tracer = context.Process(target=trace, args=(done, started))
    tracer.start()
    try:
        assert started.wait(120)
        refused = next(calls)
    finally:
        done.set()
        tracer.join()
    assert not refused and tracer.exitcode == 0
