"""What is tried with one architecture of transformers, and what each trial says.

A cell is a word and a reason. The word is one of:

exact: regard's result keeps the error rule of `tests/rules.py` against eager attention in float64.
own: the same, and regard was never called: the architecture computes its attention itself, or has
    none.
refused: regard raised its own error; the reason is its message.
skip: transformers' eager attention cannot do it either, or it does not apply; the reason says
    which.
WRONG, CRASH: what must never be: another result, or somebody else's exception.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from tests.integrations.families import keep, loud, transformers
from tests.integrations.matrix.tiny import tiny
from tests.rules import GRADIENT, assert_close_rule

COLUMNS = ("switch", "prefill", "padding", "dynamic", "static", "beams", "gradients", "compile")
LENGTH, SHORT, PROMPT, NEW = 14, 9, 8, 6
MOST = 3e7
"""Parameters of a model that is still tried."""

F64 = torch.float64
SEQ2SEQ = frozenset(
    [
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "marian",
        "mbart",
        "mvp",
        "pegasus",
        "plbart",
        "prophetnet",
    ]
)
"""Architectures with a decoder alone for causal use, which are tried with their encoders."""


class NotApplicable(Exception):
    """There is nothing to compare with."""


@dataclass
class Counter:
    """Stands in the place of regard's attention function, and counts its calls."""

    function: Callable[..., Any]
    count: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.function(*args, **kwargs)


def tables() -> dict[str, Any]:
    """The model class of each model_type, by the kind of use."""
    from transformers.models.auto import modeling_auto as auto

    return {
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "base": auto.MODEL_MAPPING_NAMES,
    }


def architectures() -> list[str]:
    """Every model_type with a causal, a sequence-to-sequence or a base model."""
    return sorted({name for table in tables().values() for name in table})


def class_of(model_type: str) -> tuple[str, Any]:
    """The kind of use, and the model's class."""
    for kind, table in tables().items():
        name = table.get(model_type)
        if name is not None and not (kind == "causal" and model_type in SEQ2SEQ):
            return kind, getattr(transformers, name if isinstance(name, str) else name[0])
    raise KeyError(model_type)


@dataclass
class Subject:
    """One architecture: how it is built, and what it is given."""

    model_type: str
    kind: str = ""
    cls: Any = None
    config: Any = None
    made: dict[tuple[str, torch.dtype], Any] = field(default_factory=dict)

    def build(self) -> None:
        """The eager model, with weights that make scores differ by more than rounding."""
        self.kind, self.cls = class_of(self.model_type)
        kind = transformers.CONFIG_MAPPING[self.model_type]
        wanted = getattr(self.cls, "config_class", None)
        if wanted is not None and not issubclass(kind, wanted):
            kind = wanted
        self.config = tiny(kind, self.model_type)
        self.config._attn_implementation = "eager"
        with torch.device("meta"):
            size = sum(x.numel() for x in self.cls(copy.deepcopy(self.config)).parameters())
        if size > MOST:
            raise NotApplicable(f"its tiny configuration has {size / 1e6:.0f} million parameters")
        torch.manual_seed(7)
        eager = self.made["eager", torch.float32] = settled(self.cls(copy.deepcopy(self.config)))
        weights = copy.deepcopy(eager.state_dict())
        louder(eager)
        with torch.no_grad():
            found = self.outputs("eager", torch.float32, **self.inputs())
        if not _finite(found) or float(found.abs().max()) > 1e4:
            eager.load_state_dict(weights)

    def model(self, attention: str, dtype: torch.dtype) -> Any:
        """The model built with an attention implementation; the same weights each time."""
        if (attention, dtype) not in self.made:
            config = copy.deepcopy(self.config)
            config._attn_implementation = attention
            torch.manual_seed(7)
            model = settled(self.cls(config))
            model.load_state_dict(self.made["eager", torch.float32].state_dict())
            self.made[attention, dtype] = model.to(dtype)
        return self.made[attention, dtype]

    def inputs(self) -> dict[str, Any]:
        """What one call takes."""
        main = self.cls.main_input_name
        draw = torch.Generator().manual_seed(3)
        found: dict[str, Any] = {}
        if main == "input_ids":
            found["input_ids"] = torch.randint(3, 40, (2, LENGTH), generator=draw)
        elif main == "pixel_values":
            vision = getattr(self.config, "vision_config", self.config)
            side = getattr(vision, "image_size", 16)
            sides = (side, side) if isinstance(side, int) else tuple(side)
            shape = (2, getattr(vision, "num_channels", 3), *sides)
            found["pixel_values"] = torch.randn(shape, generator=draw)
        elif main == "input_values":
            found["input_values"] = torch.randn(2, 800, generator=draw)
        elif main == "input_features":
            bands = getattr(self.config, "num_mel_bins", getattr(self.config, "feature_size", 8))
            length = 2 * getattr(self.config, "max_source_positions", 16)
            found["input_features"] = torch.randn(2, bands, length, generator=draw)
        else:
            raise NotApplicable(f"no made-up input for {main}")
        takes = inspect.signature(self.cls.forward).parameters
        both = {"input_ids", "pixel_values"} <= takes.keys() and hasattr(
            self.config, "vision_config"
        )
        if both and (hasattr(self.config, "projection_dim") or self.model_type == "siglip"):
            # two towers, that meet at the end
            found["input_ids"] = torch.randint(3, 40, (2, LENGTH), generator=draw)
            found["pixel_values"] = torch.randn(
                2, 3, *[self.config.vision_config.image_size] * 2, generator=draw
            )
        if "decoder_input_ids" in takes:
            found["decoder_input_ids"] = torch.randint(3, 40, (2, 6), generator=draw)
        return found

    def outputs(
        self, attention: str, dtype: torch.dtype, model: Any = None, **given: Any
    ) -> Tensor:
        """The first float tensor that the model gives."""
        model = self.model(attention, dtype) if model is None else model
        given = {
            name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in given.items()
        }
        torch.manual_seed(5)
        return first(model(**given))


def settled(model: Any) -> Any:
    """Evaluation mode, and experts one by one: the fused ones know no float64."""
    with suppress(AttributeError, ValueError, RuntimeError):
        model.set_experts_implementation("eager")
    return model.eval()


def louder(model: nn.Module) -> None:
    """Weights so large that scores differ by more than rounding, and decays and steps that stay in
    their range.
    """
    loud(model)
    for module in model.modules():
        for name, x in module.named_parameters(recurse=False):
            if x.ndim > 2 or "conv" in type(module).__name__.lower():
                x.data.normal_(0, (x.numel() / x.shape[0]) ** -0.5)
            if name in ("A_log", "dt_bias", "D"):
                x.data.uniform_(0.1, 1)


def first(found: Any) -> Tensor:
    """The logits or hidden states, or else the first float tensor of what a model returns."""
    for name in ("logits", "last_hidden_state"):
        x = getattr(found, name, None)
        if isinstance(x, Tensor):
            return x
    values = list(found.values()) if hasattr(found, "values") else found
    for x in [values] if isinstance(values, Tensor) else list(values):
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 1:
            return x
        if isinstance(x, (tuple, list)) or hasattr(x, "values"):
            return first(x)
    raise NotApplicable("it gives no float tensor")


def run(model_type: str, columns: tuple[str, ...] = COLUMNS) -> dict[str, Any]:
    """The row of one architecture: its model_type, kind of use, class, why it was not built if so,
    and a cell a column.
    """
    table = transformers.AttentionInterface._global_mapping
    before = table["regard"]
    counter = table["regard"] = Counter(before)
    subject = Subject(model_type)
    row: dict[str, Any] = {"model_type": model_type}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                subject.build()
                why = ""
            except Exception as error:
                why = told(error)
            row |= {
                "kind": subject.kind,
                "class": getattr(subject.cls, "__name__", ""),
                "built": why,
            }
            for column in () if why else columns:
                counter.count = 0
                word, why = cell(subject, column)
                row[column] = ["own" if word == "exact" and not counter.count else word, why]
    finally:
        table["regard"] = before
    return row


def cell(subject: Subject, column: str) -> tuple[str, str]:
    """One trial: the word and the reason."""
    try:
        _TRIALS[column](subject)
    except NotApplicable as reason:
        return "skip", str(reason)
    except AssertionError as error:
        return "WRONG", told(error)
    except RegardError as error:
        return "refused", told(error)
    except Exception as error:
        return "CRASH", f"{type(error).__name__}: {told(error)}"
    return "exact", ""


def told(error: BaseException) -> str:
    """The message of an exception in one line."""
    return " ".join((str(error) or type(error).__name__).split())[:200]


Run: TypeAlias = Callable[[str, torch.dtype], tuple[Tensor, ...]]
"""Runs a model under an attention implementation, in a dtype."""


def assert_like_eager(run: Run, factor: float = 2.0) -> None:
    """Hold regard against eager attention by the error rule.

    The reference is eager attention in float64, the plain math eager attention in float32. Where
    the code of a model needs float32, the reference is eager attention in float32, and the plain
    math sdpa in float32 and a hundred roundings. Integers, such as tokens, must be equal.
    """
    try:
        plain = run("eager", torch.float32)
    except Exception as error:
        raise NotApplicable(f"eager: {type(error).__name__}: {told(error)}") from error
    dtype, exact = F64, plain
    try:
        with bounded_masks():
            exact = run("eager", F64)
    except Exception:
        dtype = torch.float32
    if not all(map(_finite, exact)):
        dtype, exact = torch.float32, plain
    if not all(map(_finite, exact)):
        raise NotApplicable("eager: its result is not finite")
    chosen = [(x, y) for x, y in zip(plain, exact, strict=True) if not x.is_floating_point()]
    if not all(torch.equal(x, y) for x, y in chosen):
        # float32 chose other tokens, so that its error says nothing
        dtype, exact = torch.float32, plain
    found = run("regard", dtype)
    others = [plain]
    if dtype == torch.float32:
        others = [tuple(map(_rounded, exact))]
        with suppress(Exception):  # not every class has it
            others.append(run("sdpa", torch.float32))
    for i, (x, ref) in enumerate(zip(found, exact, strict=True)):
        if not ref.is_floating_point():
            assert torch.equal(x, ref), f"{x.tolist()}, not {ref.tolist()}"
            continue
        plains = [other[i] for other in others if other[i].shape == ref.shape]
        assert_close_rule(x.to(plains[0].dtype), plains, ref, factor=factor)


def _finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _rounded(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    return x + 100 * torch.finfo(x.dtype).eps * x.abs().max()


@contextmanager
def bounded_masks() -> Iterator[None]:
    """Eager attention's masks hold -1e30 for the lowest float64, which its softmax in float32 would
    take for -inf.
    """
    table = transformers.AttentionMaskInterface._global_mapping
    own = table["eager"]

    def bounded(*args: Any, **kwargs: Any) -> Tensor | None:
        found = own(*args, **kwargs)
        return None if found is None else found.clamp(min=-1e30)

    table["eager"] = bounded
    try:
        yield
    finally:
        table["eager"] = own


def _prefill(subject: Subject) -> None:
    given = subject.inputs()

    def run(attention: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (subject.outputs(attention, dtype, **given),)

    assert_like_eager(run)


def _padding(subject: Subject) -> None:
    given = subject.inputs()
    if "input_ids" not in given:
        raise NotApplicable("its inputs are not tokens")
    side = "left" if subject.kind == "causal" else "right"
    mask = keep([LENGTH, SHORT], LENGTH, side)
    given["attention_mask"] = mask

    def run(attention: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        with torch.no_grad():
            found = subject.outputs(attention, dtype, **given)
        return (found[mask.bool()] if found.shape[:2] == mask.shape else found,)

    assert_like_eager(run)


def _switch(subject: Subject) -> None:
    given = subject.inputs()

    def run(attention: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        model = subject.model("eager", dtype)
        if attention != "eager":
            model = copy.deepcopy(model)
            model.set_attn_implementation(attention)
        with torch.no_grad():
            return (subject.outputs(attention, dtype, model=model, **given),)

    assert_like_eager(run)


def _generated(subject: Subject, **how: Any) -> None:
    given = subject.inputs()
    if subject.kind == "base" or "input_ids" not in given or not subject.cls.can_generate():
        raise NotApplicable("it does not generate")
    ids = given["input_ids"][:, :PROMPT]
    side = "left" if subject.kind == "causal" else "right"
    mask = keep([PROMPT, PROMPT - 3], PROMPT, side)
    how |= {"decoder_start_token_id": 1} if subject.kind == "seq2seq" else {}

    def run(attention: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        with torch.no_grad():
            found = subject.model(attention, dtype).generate(
                ids,
                attention_mask=mask,
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                pad_token_id=0,
                **how,
            )
        if "num_beams" in how:  # the logits of beams that were given up may stand in any order
            return (found.sequences,)
        return found.sequences, torch.stack(found.logits)

    assert_like_eager(run)


def _gradients(subject: Subject) -> None:
    given = subject.inputs()
    scale = 0.0

    def run(attention: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        nonlocal scale
        model = subject.model(attention, dtype)
        model.zero_grad()
        found = subject.outputs(attention, dtype, **given)
        if not found.requires_grad:
            raise NotApplicable("its output has no gradient")
        toward = torch.randn(found.shape, generator=torch.Generator().manual_seed(9))
        (found * toward.to(found.dtype)).sum().backward()
        grads = [
            x.new_zeros(x.numel()) if x.grad is None else x.grad.flatten()
            for x in model.parameters()
        ]
        model.zero_grad()
        joined = torch.cat([x.to(dtype) for x in grads])
        scale = scale or float(joined.abs().max()) or 1.0
        return (joined / scale,)

    assert_like_eager(run, factor=GRADIENT)


def _compile(subject: Subject) -> None:
    given = subject.inputs()

    def compiled(attention: str, dtype: torch.dtype) -> Tensor:
        torch._dynamo.reset()
        model = torch.compile(subject.model(attention, dtype), backend="eager")
        with torch.no_grad():
            return subject.outputs(attention, dtype, model=model, **given)

    def run(attention: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        if attention != "regard":
            with torch.no_grad():
                return (subject.outputs(attention, dtype, **given),)
        try:
            return (compiled("regard", dtype),)
        except RegardError:
            raise
        except Exception as ours:
            try:
                compiled("eager", dtype)
            except Exception as error:
                why = f"eager: {type(error).__name__}: {told(error)}"
                raise NotApplicable(why) from error
            raise ours from None

    assert_like_eager(run)


_TRIALS: dict[str, Callable[[Subject], None]] = {
    "switch": _switch,
    "prefill": _prefill,
    "padding": _padding,
    "dynamic": _generated,
    "static": lambda subject: _generated(subject, cache_implementation="static"),
    "beams": lambda subject: _generated(subject, num_beams=3),
    "gradients": _gradients,
    "compile": _compile,
}
