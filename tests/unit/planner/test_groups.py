"""Groups of layers, bytes of a block, blocks of a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.errors import ConfigError
from pdkv.planner.dtypes import HeadShape
from pdkv.planner.groups import Group, bytes_per_token_on_rank, cache_shape, stage_of_layers
from pdkv.planner.layers import AttentionLayer, LatentLayer, ModelShape, Page, PageFormat
from pdkv.planner.model_config import read_model
from pdkv.planner.presets import find_model

pytestmark = pytest.mark.cpu

HEAD = HeadShape(64, 64, 64)
FULL = AttentionLayer(4, HEAD)
SLIDING = AttentionLayer(4, HEAD, window=100)


def model_of(*layers: AttentionLayer | LatentLayer) -> ModelShape:
    return ModelShape("m", tuple((layer,) for layer in layers), "bfloat16")


def preset(name: str) -> ModelShape:
    return read_model(find_model(name).config, name)


class TestGrouping:
    def test_layers_alike_make_one_group_whose_block_has_a_page_of_each(self) -> None:
        shape = cache_shape(model_of(FULL, FULL, FULL), PageFormat())
        assert [len(group.pages) for group in shape.groups] == [3]
        assert shape.block_bytes() == 3 * 16 * 4 * 256

    def test_a_hybrid_has_groups_of_the_rarer_kinds_size_and_a_block_of_one_group(self) -> None:
        shape = cache_shape(model_of(FULL, *[SLIDING] * 5, FULL, *[SLIDING] * 5), PageFormat())
        assert [len(group.pages) for group in shape.groups] == [2] * 6
        assert shape.block_bytes() == 2 * 16 * 4 * 256

    def test_kinds_of_nearly_equal_number_make_one_group_each(self) -> None:
        shape = cache_shape(model_of(*[FULL] * 13, *[SLIDING] * 12), PageFormat())
        assert sorted(len(group.pages) for group in shape.groups) == [12, 13]

    def test_smaller_pages_get_larger_blocks(self) -> None:
        shape = cache_shape(model_of(AttentionLayer(8, HEAD), SLIDING), PageFormat())
        sizes = {group.pages[0].kind: group.pages[0].block_size for group in shape.groups}
        assert sizes == {"full": 16, "sliding": 32}

    def test_pages_that_do_not_divide_are_padded(self) -> None:
        shape = cache_shape(model_of(AttentionLayer(6, HEAD), SLIDING), PageFormat())
        assert {group.pages[0].nbytes for group in shape.groups} == {16 * 6 * 256}
        assert {group.pages[0].block_size for group in shape.groups} == {16}

    def test_latent_pages_that_would_need_padding_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="latent pages cannot be padded"):
            cache_shape(model_of(LatentLayer(96, 4), SLIDING), PageFormat())

    def test_an_attention_page_holds_a_mamba_state(self) -> None:
        shape = cache_shape(preset("nemotron-h-8b"), PageFormat())
        state = (128 * 64 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4
        assert shape.block_size == 16 * -(-state // (16 * 4096)) == 1040
        assert {page.nbytes for group in shape.groups for page in group.pages} == {1040 * 4096}


class TestRanks:
    def test_tensor_parallelism_splits_heads_and_then_replicates(self) -> None:
        model = preset("llama-3.1-70b")
        per_rank = [bytes_per_token_on_rank(model, PageFormat(tensor_parallel=tp)) for tp in (1, 2, 8, 16)]
        assert per_rank == [327_680, 163_840, 40_960, 40_960]

    def test_a_latent_is_whole_on_every_rank(self) -> None:
        model = preset("deepseek-v3")
        assert bytes_per_token_on_rank(model, PageFormat(tensor_parallel=8)) == 70_272

    def test_the_rest_of_the_layers_goes_to_stages_before_the_last(self) -> None:
        assert [stage_of_layers(61, 4).count(stage) for stage in range(4)] == [15, 15, 16, 15]

    def test_the_stage_with_the_most_layers_has_the_largest_blocks(self) -> None:
        shape = cache_shape(preset("deepseek-v3"), PageFormat(), pipeline_parallel=4)
        assert shape.widest_stage == 2
        assert shape.block_bytes(2) == 16 * 16 * 1152
        assert bytes_per_token_on_rank(preset("deepseek-v3"), PageFormat(), 4) == 16 * 1152

    def test_more_stages_than_layers_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="exceeds the 2 layers"):
            cache_shape(model_of(FULL, FULL), PageFormat(), pipeline_parallel=3)


class TestBlocksOfARequest:
    def group(self, kind: str, extent: int = 0) -> Group:
        return Group((Page(kind, 4096, 16, extent),), (0,))  # type: ignore[arg-type]

    def blocks(self, group: Group, context: int, in_flight: int = 2) -> int:
        return group.blocks_for(context, in_flight_tokens=in_flight, state_blocks=2)

    def test_full_attention_keeps_every_token(self) -> None:
        assert self.blocks(self.group("full"), 1001) == 63

    def test_a_window_keeps_its_tokens_and_one_block_for_where_it_begins(self) -> None:
        assert self.blocks(self.group("sliding", 128), 100_000) == 9 + 1
        assert self.blocks(self.group("sliding", 128), 100_000, in_flight=8192) == 520 + 1

    def test_a_request_shorter_than_the_window_keeps_its_own_tokens_only(self) -> None:
        assert self.blocks(self.group("sliding", 4096), 100) == 7

    def test_a_chunk_keeps_its_tokens(self) -> None:
        assert self.blocks(self.group("chunked", 160), 100_000, in_flight=16) == 11

    def test_an_encoders_states_and_a_recurrent_state_do_not_depend_on_the_context(self) -> None:
        assert {self.blocks(self.group("cross", 1500), context) for context in (1, 448)} == {94}
        assert {self.blocks(self.group("state"), context) for context in (1, 10**6)} == {2}

    @given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 4096))
    def test_no_bounded_layer_keeps_more_than_a_full_one(self, context: int, extent: int, in_flight: int) -> None:
        full = self.blocks(self.group("full"), context, in_flight)
        assert self.blocks(self.group("sliding", extent), context, in_flight) <= full
        assert self.blocks(self.group("chunked", extent), context, in_flight) <= full
