"""Every row of CODECS: what is decoded equals what was encoded as far as the fidelity says, and only filled tokens travel."""

import numpy as np
import pytest

from kvstore.codec import CODECS, FIDELITIES, acceptable, open_codec
from kvstore.layout import ITEM_BYTES, BlockLayout
from protocol.errors import ConfigError

LAYOUTS = [BlockLayout(2, 3, 8, 32, dtype) for dtype in ITEM_BYTES]
every = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.dtype)
rows = pytest.mark.parametrize("row", CODECS)
tokens = pytest.mark.parametrize("num_tokens", [1, 7, 31, 32])


def tokens_of(block, layout):
    heads, layers, kv, count, dim = layout.shape
    return block.reshape(heads, layers, kv, count, dim * ITEM_BYTES[layout.dtype])


@rows
@every
@tokens
def test_round_trip(row, layout, num_tokens):
    codec = open_codec(row, layout)
    block = np.random.default_rng(1).integers(0, 256, layout.block_bytes, dtype=np.uint8)
    out = np.full(layout.block_bytes, 7, dtype=np.uint8)
    length = codec.encode(block, num_tokens, out)
    assert 0 < length <= codec.encoded_bytes(num_tokens) <= layout.block_bytes
    assert (out[length:] == 7).all()
    if codec.in_place(num_tokens):
        assert np.array_equal(out[:length], block)
    decoded = np.full(layout.block_bytes, 9, dtype=np.uint8)
    codec.decode(out[:length], num_tokens, decoded)
    if codec.fidelity == "raw":
        assert np.array_equal(tokens_of(decoded, layout)[:, :, :, :num_tokens], tokens_of(block, layout)[:, :, :, :num_tokens])
    assert (tokens_of(decoded, layout)[:, :, :, num_tokens:] == 9).all()


@rows
@every
def test_a_wrong_length_is_refused(row, layout):
    codec = open_codec(row, layout)
    with pytest.raises(ValueError, match="bytes"):
        codec.decode(np.zeros(codec.encoded_bytes(3) - 1, dtype=np.uint8), 3, np.zeros(layout.block_bytes, dtype=np.uint8))


@rows
def test_fidelity_has_a_rank(row):
    codec = open_codec(row, LAYOUTS[0])
    assert codec.name == row and codec.fidelity in FIDELITIES


def test_a_copy_is_never_taken_for_a_better_or_unknown_one():
    assert acceptable("raw", "raw") and acceptable("anything", "")
    assert not acceptable("anything", "raw") and not acceptable("raw", "anything")
    assert all(acceptable(better, worse) for i, better in enumerate(FIDELITIES) for worse in FIDELITIES[i:])


def test_unknown_row_is_a_config_error():
    with pytest.raises(ConfigError, match="raw"):
        open_codec("nope", LAYOUTS[0])
