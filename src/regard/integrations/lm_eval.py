"""The model type `regard` of lm-evaluation-harness, which importing this module registers.

lm_eval reads no entry points, so that its command line runs through this module:

    python -m regard.integrations.lm_eval run --model regard --tasks wikitext \\
        --model_args pretrained=smollm2,dtype=float32

In Python: `import regard.integrations.lm_eval`, then `lm_eval.simple_evaluate("regard", ...)`.
Windows, prefixes and sums are those of lm_eval's type `hf`. Install with: pip install lm_eval.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

try:
    import lm_eval.models  # noqa: F401  (registers the types of lm_eval, which it reads only once)
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise ImportError(
        "regard.integrations.lm_eval needs lm_eval: pip install lm_eval", name="lm_eval"
    ) from error

import regard
from regard.errors import ArgumentError
from regard.models import Model
from regard.standard_output import run_program

Pair = tuple[object, Sequence[int], Sequence[int]]


@register_model("regard")
class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A decoder of regard, as lm_eval asks it.

    Args:
        pretrained: what `regard.load` takes, or a loaded `Model`.
        batch_size: the number of rows of one forward pass.
        max_length: the number of tokens of a window; None is the model's longest text, or 2,048.
        dtype: the dtype of the weights, such as "float32"; None is that of the files.
        device: where the model runs; None is the CPU.
        options: what lm_eval sends of itself; `max_batch_size` is ignored.

    Raises:
        ArgumentError: the model is no decoder with a tokenizer, or an option is unknown.
    """

    def __init__(
        self,
        pretrained: str | Model = "tiny",
        batch_size: int | str = 1,
        max_length: int | None = None,
        dtype: str | None = None,
        device: str | None = None,
        **options: object,
    ) -> None:
        super().__init__()
        if unknown := {*options} - {"max_batch_size"}:
            raise ArgumentError(f"the model type regard has no argument {', '.join(unknown)}")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ArgumentError(f"batch_size is {batch_size!r}; it must be a number from 1")
        model: Any = pretrained
        if isinstance(pretrained, str):
            model = regard.load(pretrained, dtype=getattr(torch, dtype) if dtype else None)
        if not isinstance(model, Model) or model.tokenizer is None or not model.eos_ids:
            raise ArgumentError("lm_eval needs a decoder with a tokenizer that ends texts")
        self.model = model if device is None else model.to(device)
        self._device, self.batch_size = model.device, int(batch_size)
        longest = getattr(model.config, "max_position_embeddings", None)
        self.max_length = int(max_length or longest or 2048)

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self._special_id("eos_token", min(self.model.eos_ids))

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context: that of a beginning, or else that of an end."""
        first = self.tok_encode("x")
        begins = first[0] if len(first) > 1 else self.eot_token_id
        return self._special_id("bos_token", begins)

    def _special_id(self, name: str, otherwise: int) -> int:
        """Return the id of a special token that the chat template names, or another one."""
        template = self.model._chat_template
        text = template.special_tokens.get(name, "") if template else ""
        return self.model.tokenizer.special.get(text, otherwise)

    def tok_encode(
        self, string: str, *, add_special_tokens: bool | None = None, **options: object
    ) -> list[int]:
        """Return the ids of a text."""
        template = add_special_tokens is not False
        return self.model.tokenizer.encode(string, special=True, template=template)

    def loglikelihood_rolling(self, requests: Iterable[Any], **options: object) -> list[float]:
        """Return the log-likelihood of each text, in windows that do not overlap."""
        sums = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            sums.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
        return sums

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], **options: object
    ) -> list[tuple[float, bool]]:
        """Return of each continuation its log-likelihood, and whether every token is the most
        likely one.
        """
        order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i][1:])))
        answers: dict[int, tuple[float, bool]] = {}
        for first in range(0, len(order), self.batch_size):
            chosen = order[first : first + self.batch_size]
            rows = [[*requests[i][1], *requests[i][2]][-self.max_length - 1 :] for i in chosen]
            width = len(rows[0]) - 1
            ids = torch.tensor(
                [[*row[:-1], *[0] * (width + 1 - len(row))] for row in rows], device="cpu"
            )
            slots = torch.arange(width, device="cpu")
            lengths = torch.tensor([[len(row) - 1] for row in rows], device="cpu")
            positions = slots.where(slots < lengths, -1).to(self.device)
            logits = self.model(ids.to(self.device), positions)
            for i, row, row_logits in zip(chosen, rows, logits, strict=True):
                ending = torch.tensor(row[-len(requests[i][2]) :], device=self.device)
                scores = row_logits[len(row) - 1 - len(ending) : len(row) - 1].log_softmax(-1)
                total = scores.gather(-1, ending[:, None]).sum()
                answers[i] = float(total), bool((scores.argmax(-1) == ending).all())
        return [answers[i] for i in range(len(requests))]

    def generate_until(self, requests: Iterable[Any], **options: object) -> list[str]:
        """Return the continuation of each prompt up to a stop string."""
        texts = []
        for prompt, asked in (request.args for request in requests):
            choices = normalize_gen_kwargs(asked)
            limit, stop = choices.pop("max_gen_toks"), choices.pop("until")
            del choices["do_sample"]
            ids = self.tok_encode(prompt)[-max(1, self.max_length - limit) :]
            texts.append("".join(self.model.generate(ids, max_tokens=limit, stop=stop, **choices)))
        return texts


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    sys.exit(run_program(cli_evaluate))
