"""The native kernels' oracles in plain torch: the same arguments, the same effect, computed in fp32 and rounded once at the end.

Knows nothing of speed. A kernel is right when it agrees with the function of its name here.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """out [T, N] = x / rms(x) * weight; x fp32."""
    out.copy_(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float())


def add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """residual += x, both fp32, then out = residual / rms(residual) * weight."""
    residual += x
    rms_norm(out, residual, weight, eps)


def silu_mul(out: Tensor, gate_up: Tensor) -> None:
    """out [T, N] = silu(gate) * up of gate_up [T, 2 N]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


def write_kv(pool: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """k, v [T, KH, D] to their slots (block * B + offset) of pool [num_blocks, KH, L, 2, B, D]; slot -1 is skipped."""
    block_tokens = pool.shape[4]
    rows = slots >= 0
    blocks, offsets = slots[rows] // block_tokens, slots[rows] % block_tokens
    pool[blocks, :, layer, 0, offsets] = k[rows]
    pool[blocks, :, layer, 1, offsets] = v[rows]


def rope_write_kv(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, layer: int, slots: Tensor) -> None:
    """Rotates q within qkv [T, (H + 2 KH) D] in place, and writes rotated k and v to the pool. cos, sin: fp32 [positions, D / 2]."""
    kv_heads, dim = pool.shape[1], pool.shape[5]
    heads = qkv.view(qkv.shape[0], -1, dim)
    q, k, v = heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    write_kv(pool, layer, _rotated(k, c, s), v, slots)
    q.copy_(_rotated(q, c, s))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def paged_attention(
    out: Tensor,
    q: Tensor,
    pool: Tensor,
    layer: int,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
    sinks: int = 0,
) -> None:
    """out, q [T, H, D]; each query of a sequence against the K/V that its blocks hold: causal, and within `window` (0: all) or the first `sinks` tokens."""
    starts = query_starts.tolist()
    for sequence, context_len in enumerate(context_lens.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        if first == last:
            continue
        k, v = (_gather(pool, layer, kind, block_tables[sequence], context_len, q.shape[1]) for kind in (0, 1))
        queries = q[first:last].float().transpose(0, 1)
        positions, tokens = torch.arange(context_len - (last - first), context_len)[:, None], torch.arange(context_len)[None, :]
        hidden = tokens > positions
        if window:
            hidden |= (tokens <= positions - window) & (tokens >= sinks)
        scores = (queries @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
        out[first:last] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)


def _gather(pool: Tensor, layer: int, kind: int, table: Tensor, context_len: int, num_heads: int) -> Tensor:
    """K or V of one sequence in fp32, [H, context, D]."""
    _, kv_heads, _, _, block_tokens, dim = pool.shape
    num_blocks = -(-context_len // block_tokens)
    blocks = pool[table[:num_blocks].long(), :, layer, kind]
    tokens = blocks.transpose(0, 1).reshape(kv_heads, -1, dim)[:, :context_len]
    return tokens.float().repeat_interleave(num_heads // kv_heads, dim=0)
