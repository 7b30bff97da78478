"""Parts of models: projections, norms, attention, feed-forward and blocks."""

from regard.nn.additive import AdditiveAttention
from regard.nn.attention import Attention
from regard.nn.block import Block
from regard.nn.cross import CrossAttention
from regard.nn.embed import Embed, Sinusoidal
from regard.nn.encoder_block import BlockCaches, DecoderBlock, EncoderBlock
from regard.nn.feed_forward import FeedForward, SwiGLU
from regard.nn.infini import InfiniAttention
from regard.nn.latent import Latent
from regard.nn.norms import RMSNorm
from regard.nn.nsa import NSA
from regard.nn.policy import rotary_heads
from regard.nn.prefix import Prefix
from regard.nn.project import Heads, Projection, Separate
from regard.nn.residual import PostNorm, PreNorm, Residual
from regard.nn.selected import SelectedAttention
from regard.nn.states import States
from regard.nn.streaming import StreamingAttention

__all__ = [
    "NSA",
    "AdditiveAttention",
    "Attention",
    "Block",
    "BlockCaches",
    "CrossAttention",
    "DecoderBlock",
    "Embed",
    "EncoderBlock",
    "FeedForward",
    "Heads",
    "InfiniAttention",
    "Latent",
    "PostNorm",
    "PreNorm",
    "Prefix",
    "Projection",
    "RMSNorm",
    "Residual",
    "SelectedAttention",
    "Separate",
    "Sinusoidal",
    "States",
    "StreamingAttention",
    "SwiGLU",
    "rotary_heads",
]
