"""Generation over ranks gives the text of one process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import regard
from regard.cli.app import run
from regard.parallel import spawn
from tests.parallel import sequence_ranks
from tests.parallel.sequence_ranks import SAMPLING, TEXT


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("W", [2, 3])
def test_the_text_is_that_of_one_process(W: int) -> None:
    model = regard.load("tiny")
    expected = ["".join(model.generate(TEXT, max_tokens=12, **x)) for x in SAMPLING]
    assert expected[0] != expected[1]
    beams = [x.text for x in model.beam_search(TEXT, beams=2, max_tokens=4)]
    results = spawn(sequence_ranks.generate_text, W)
    assert [texts for texts, _, _ in results] == [expected] * W
    assert [found for _, _, found in results] == [beams] * W
    prompt_tokens = len(model.encode(TEXT)[0])
    for stored in zip(*(counts for _, counts, _ in results), strict=True):
        assert sum(stored) == prompt_tokens + 11  # the last token is never read
        assert max(stored) - min(stored) <= 2


@pytest.mark.full
def test_the_command_generates_on_the_ranks_of_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", TEXT, "--max-tokens", "6"]
    assert run(arguments) == 0
    alone = capsys.readouterr()
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ranked = subprocess.run(
        [sys.executable, *start, "-m", "regard", *arguments, "--parallel", "context"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ranked.stdout == alone.out  # the first rank prints alone
    assert ranked.stderr.count("decoding at") == alone.err.count("decoding at") == 1
    assert run([*arguments, "--parallel", "context"]) == 2
    assert "torchrun" in capsys.readouterr().err


def test_what_cannot_be_generated_over_ranks_is_refused_by_name() -> None:
    expected = [
        "too few to be cut into two runs",
        "prompts of different lengths",
        'needs cache="growing" without max_context',
        "to call a model directly, use regard.parallel.sequence",
        "must end there",
    ]
    for texts in spawn(sequence_ranks.refused_generations, 2):
        for text, words in zip(texts, expected, strict=True):
            assert words in text
