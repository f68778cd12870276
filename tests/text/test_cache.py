"""The cache that grows in place holds what transformers' own would."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from text_agents import cache as cache_module
from text_agents.cache import growing_cache

CONFIG = LlamaConfig(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, hidden_size=8)


@pytest.mark.parametrize("room", [1, 256])
def test_what_is_selected_repeated_or_cropped_stays_so_when_the_cache_grows_in_place(monkeypatch, room):
    """A stale buffer would give a row another row's past."""
    monkeypatch.setattr(cache_module, "ROOM", room)
    torch.manual_seed(0)
    ours, theirs = growing_cache(CONFIG), DynamicCache(config=CONFIG)

    def read(rows, width):
        for layer in range(2):
            new = torch.randn(2, rows, 2, width, 4)
            for found, expected in zip(ours.update(*new, layer), theirs.update(*new, layer), strict=True):
                assert torch.equal(found, expected)

    def both(name, *arguments):
        for cache in (ours, theirs):
            getattr(cache, name)(*arguments)

    read(2, 5)
    both("batch_repeat_interleave", 2)
    for _ in range(9):
        read(4, 1)
    both("batch_select_indices", torch.tensor([3, 0, 1, 2]))  # as many rows as before
    read(4, 3)
    both("crop", 6)
    read(4, 1)
    both("batch_select_indices", torch.tensor([1, 3]))
    read(2, 2)
    assert ours.get_seq_length() == theirs.get_seq_length() == 9


def test_tokens_are_appended_without_copying_what_was_read_before():
    cache = growing_cache(CONFIG)
    first, _ = cache.update(*torch.randn(2, 1, 2, 5, 4), 0)
    later, _ = cache.update(*torch.randn(2, 1, 2, 1, 4), 0)
    assert later.data_ptr() == first.data_ptr()


def test_layers_that_look_back_over_a_window_stay_transformers_own():
    windows = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, hidden_size=8, sliding_window=4)
    assert type(growing_cache(windows).layers[0]) is type(DynamicCache(config=windows).layers[0])
