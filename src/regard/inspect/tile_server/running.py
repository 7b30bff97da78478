"""A recording that is served while its model still runs: a place can be looked at as soon as its
attention was computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor

from regard.inspect.model_run import encode_ids
from regard.inspect.record.record_model import describe_model, record_with, token_facts
from regard.inspect.record.recorded_place import Place
from regard.inspect.record.recorder import Recorder
from regard.inspect.record.recording import Recording
from regard.inspect.tile_server.head_overviews import OverviewRecorder, Overviews
from regard.inspect.tile_server.session import ViewSession
from regard.models.model import Model
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import TextEncoder
from regard.timing import torch_threads


class Ended(Exception):
    """Ends the run of a model whose recording is no longer wanted."""


class RunningRecording:
    """Runs a model on a text in a thread, and serves the places that it has reached.

    The places of an encoder-decoder have many steps, so that they are there only at the end.

    Args:
        select: which layers and heads are kept (`places`, `heads`); of all other heads only the
            overviews.
    """

    def __init__(
        self, model: Model | TextEncoder | Seq2Seq, text: Any, select: Mapping[str, Any]
    ) -> None:
        self._model, self._text = model, text
        self._places: dict[str, Place] = {}
        self._changed, self._ended = threading.Condition(), False
        self._go_on = threading.Event()
        self._result: Future[Recording] = Future()
        self._recorder = _Arriving(self._arrived, places=select["places"], heads=select["heads"])
        chosen = any(x is not None for x in select.values())
        self._reducer = OverviewRecorder() if chosen else None
        self.overviews = self._reducer.overviews if self._reducer else Overviews()
        self.session: ViewSession | None = None
        layers = getattr(model.config, "num_hidden_layers", 0)
        self.expected = len(select["places"] or range(layers))
        self._facts: dict[str, object] = {}
        if not isinstance(model, Seq2Seq):
            ids: Tensor
            if isinstance(model, Model):
                ids, _ = encode_ids(model, text)
            else:
                ids = text if isinstance(text, Tensor) else model.encode(text).ids
            self._facts = token_facts(model, ids)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def first(self) -> Recording:
        """Wait for the first place, and return the recording so far; raise what the run raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._places or self._result.done())
        return self._result.result() if self._result.done() else self._so_far()

    def follow(self, say: Callable[[int, int], object] = lambda n, of: None) -> Recording:
        """Wait until the model has run, and return the whole recording; `say` is called with the
        number of places so far and at the end.
        """
        self._go_on.set()
        while not self._result.done():
            with self._changed:
                self._changed.wait(0.5)
            say(len(self._places), max(self.expected, len(self._places) + 1))
        return self._result.result()

    def serve(self, session: ViewSession) -> None:
        """Give the places that arrive from now on to a session of the first ones; the run goes on
        when the picture on which the page opens is made.
        """
        with torch_threads(1):
            session.prepare()
        self.session = session
        with self._changed:
            self._give()
        self._go_on.set()

    def end(self) -> None:
        """End the run at the next call of attention."""
        self._ended = True
        self._go_on.set()
        self._thread.join(30)

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                if self._reducer is not None:
                    stack.enter_context(self._reducer)
                self._result.set_result(record_with(self._recorder, self._model, self._text))
        except BaseException as error:
            self._result.set_exception(error)
        with self._changed:
            self._give()
            self._changed.notify_all()

    def _arrived(self, name: str, place: Place | None) -> None:
        if self._ended:
            raise Ended
        if place is None or not self._facts:
            return
        with self._changed:
            self._places[name] = place
            self._give()
            self._changed.notify_all()
        self._go_on.wait()
        if self.session is not None:
            self.session.yield_to_requests()

    def _give(self) -> None:
        if self.session is None:
            return
        done = self._result.done() and self._result.exception() is None
        here = self._result.result() if done else self._so_far()
        total = max(self.expected, len(here) + 1)
        self.session.arrived(here, 0 if self._result.done() else total)

    def _so_far(self) -> Recording:
        recording = Recording(dict(self._places), metadata=describe_model(self._model))
        return replace(recording, **self._facts)  # type: ignore[arg-type]


class _Arriving(Recorder):
    """A recorder that hands over a place whenever a call of it was recorded."""

    def __init__(self, arrived: Callable[[str, Place | None], object], **select: Any) -> None:
        super().__init__(keep=(), **select)
        self._on_arrival = arrived

    def on_place(self, name: str) -> None:
        """Hand over the place that was recorded last."""
        self._on_arrival(name, self.place(name))
