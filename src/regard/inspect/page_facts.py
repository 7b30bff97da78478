"""What a page says of a place and of a run besides their numbers: names, rotary frequencies,
costs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.cost import attention_flops
from regard.cost.softmax import attention_bytes
from regard.inspect.place import Place
from regard.inspect.recording import Recording
from regard.positions import Rotary


def source(recording: Recording) -> dict[str, Any]:
    """What a run was, in words: what its recorder said of it, then its kernels, places and
    tokens.
    """
    places = list(recording.places.values())
    kernels = sorted({step.kernel for place in places for step in place.steps})
    about = {name: str(value) for name, value in recording.about.items()}
    about |= {"kernel": ", ".join(kernels), "dtype": str(places[0].pools[0].k.dtype)[6:]}
    about |= {"places": str(len(places)), "tokens": str(max(place.N for place in places))}
    text = "".join(recording.pieces).replace("·", " ").strip()
    return {"title": text[:80], "model": about.get("model", ""), "about": about}


def label(name: str) -> str:
    """What a place is called where there is little room.

    >>> label("layers.3"), label("decoder.layers.0.cross"), label("")
    ('3', 'decoder.layers.0.cross', 'attend')
    """
    last = name.rpartition(".")[2]
    return last if name.count(".") == 1 and last.isdecimal() else name or "attend"


def cost(place: Place, pairs: int) -> dict[str, Any]:
    """FLOPs and bytes of one batch row of a place by the formulas of `regard.cost`, and what caches
    keep of its keys.

    Args:
        place: of a recording.
        pairs: query-key pairs that are visible, of all recorded heads.
    """
    pool = place.pools[0]
    D, size = pool.k.shape[3], pool.k.element_size()
    E = D if pool.v is None else pool.v.shape[3]
    kinds = {"MHA": place.H, "GQA": place.G, "MQA": 1}
    return {
        "flops": attention_flops(pairs, D, E),
        "bytes": attention_bytes(
            B=1, H=len(place.heads), G=place.G, T=place.T, S=place.N, D=D, E=E, itemsize=size
        ),
        "kv_bytes": {
            name: n * place.N * (D + E) * size
            for name, n in kinds.items()
            if name != "GQA" or 1 < n < place.H
        },
    }


def rotary(model: Any, place: str) -> dict[str, Any] | None:
    """What turns a place's queries and keys last, if that is one rotary step whose frequencies stay
    the same; else None.

    Only then are the first dims of the recorded q and k pairs that can be turned back. MLA's are
    not: its rotary dims are the last ones, and its keys one for all heads.
    """
    modules = dict(model.decoder.named_modules()) if hasattr(model, "decoder") else {}
    layer = modules.get(place)
    named = [] if layer is None else list(layer.named_modules())
    lists = [x for name, x in named if name.endswith("steps") and isinstance(x, nn.ModuleList)]
    last = [steps[-1] for steps in lists if len(steps)]
    first = last[0] if last else None
    if not isinstance(first, Rotary) or first.follows:
        return None
    if not all(isinstance(x, Rotary) and torch.equal(x.inv_freq, first.inv_freq) for x in last):
        return None
    return {
        "layout": first.layout,
        "inv_freq": first.inv_freq.tolist(),
        "factor": float(first.rotary_factor),
        "dims": 2 * first.inv_freq.numel(),
    }


def stored(x: Tensor) -> NDArray[Any]:
    """A tensor without loss: bfloat16 as its upper 16 bits, fp16 as float32.

    >>> stored(torch.tensor([1.0], dtype=torch.bfloat16)).tolist() == [0x3F80]
    True
    """
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.uint16).numpy()
    return x.numpy() if x.dtype == torch.float64 else x.float().numpy()


def packed(x: NDArray[Any]) -> float:
    """Bytes that an array takes, about: bits and bytes of patterns compress well, floats do not."""
    return x.nbytes * (0.25 if x.dtype == np.uint8 else 1.0)
