import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_kvcache_v1.errors import ModelError
from fastdeploy_kvcache_v1.lab.model.sampler import SamplingParams, sample


def draw(logits, params, count=4000):
    """Share of each token over `count` positions."""
    logits = np.asarray(logits, dtype=np.float32)
    counts = np.bincount([sample(logits, params, position) for position in range(count)], minlength=len(logits))
    return counts / count


GREEDY = [{"temperature": 0, "top_p": 0.5}, {"temperature": 1e-300}, {"top_p": 0}, {"top_k": 1}]


@pytest.mark.parametrize("values", GREEDY)
def test_greedy_takes_the_best_and_of_equal_ones_the_lower_id(values):
    logits = np.array([1, 3, 3 if values.get("temperature") != 1e-300 else 2.9, -5], dtype=np.float32)
    assert {sample(logits, SamplingParams(**values), position) for position in range(50)} == {1}


def test_impossible_tokens_are_never_drawn():
    logits = np.array([-np.inf, 0, -np.inf, 0, -np.inf], dtype=np.float32)
    assert np.flatnonzero(draw(logits, SamplingParams())).tolist() == [1, 3]


def test_temperature_sharpens():
    probabilities = np.array([0.5, 0.3, 0.2])
    expected = probabilities**2 / (probabilities**2).sum()
    assert draw(np.log(probabilities), SamplingParams(temperature=0.5)) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        *(({"top_p": top_p}, [2, 0, 1][:size]) for top_p, size in ((0.45, 1), (0.55, 2), (0.79, 2), (0.81, 3))),
        ({"top_p": 1.0}, [0, 1, 2, 3]),  # the softmax
        ({"top_k": 1}, [2]),
        ({"top_k": 2}, [0, 2]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_k": -1}, [0, 1, 2, 3]),
        ({"top_k": 2, "top_p": 0.6}, [2]),  # 0.5 of the 0.8 that two tokens hold
        ({"min_p": 0.29}, [0, 1, 2]),
        ({"min_p": 0.31}, [0, 2]),
        ({"min_p": 1}, [2]),
    ],
)
def test_top_p_top_k_and_min_p_keep_the_most_likely(values, kept):
    probabilities = np.array([0.3, 0.15, 0.5, 0.05])
    shares = draw(np.log(probabilities), SamplingParams(**values))
    assert np.flatnonzero(shares).tolist() == sorted(kept)
    assert shares[kept] == pytest.approx(probabilities[kept] / probabilities[kept].sum(), abs=0.03)


@pytest.mark.parametrize("temperature", [0, 1])
def test_banned_tokens_are_never_drawn_and_the_logits_stay(temperature):
    logits = np.array([3, 0, 2, 0], dtype=np.float32)
    params = SamplingParams(temperature=temperature, banned_tokens=(0, 2))
    assert set(np.flatnonzero(draw(logits, params))) <= {1, 3}
    assert logits.tolist() == [3, 0, 2, 0]


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**40),
    temperature=st.floats(0, 10),
    top_p=st.floats(0, 1, exclude_min=True),
)
def test_a_pure_function(seed, position, temperature, top_p):
    logits = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    before = logits.copy()
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    token = sample(logits, params, position)
    assert 0 <= token < 50
    assert sample(logits, pickle.loads(pickle.dumps(params)), position) == token
    assert np.array_equal(logits, before)


def test_seed_and_position_both_matter():
    logits = np.zeros(1000, dtype=np.float32)
    tokens = {(seed, p): sample(logits, SamplingParams(seed=seed), p) for seed in range(30) for p in range(30)}
    assert len(set(tokens.values())) > 500
    assert tokens[1, 2] != tokens[2, 1]


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_fail_the_request(temperature):
    logits = np.array([0, np.nan, 1], dtype=np.float32)
    with pytest.raises(ModelError, match="not finite at position 7"):
        sample(logits, SamplingParams(temperature=temperature), 7)
