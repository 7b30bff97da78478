"""Parts of models: projections, norms, attention, feed-forward and blocks."""

from regard.nn.attention import Attention
from regard.nn.block import Block
from regard.nn.feed_forward import SwiGLU
from regard.nn.norms import RMSNorm
from regard.nn.project import Heads, Projection, Separate

__all__ = ["Attention", "Block", "Heads", "Projection", "RMSNorm", "Separate", "SwiGLU"]
