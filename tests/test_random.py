import numpy as np
import pytest

from isogeom import _xp
from isogeom._random import check_rng, standard_normal


class TestCheckRng:
    @pytest.mark.parametrize("seed", [7, np.int64(7), np.uint8(7)])
    def test_integers(self, seed):
        assert check_rng(seed).random() == np.random.default_rng(7).random()

    def test_seed_sequence(self):
        assert check_rng(np.random.SeedSequence(7)).random() == np.random.default_rng(7).random()

    def test_generator_is_used_as_it_is(self):
        rng = np.random.default_rng(0)
        assert check_rng(rng) is rng

    def test_random_state_is_reproducible_and_advances(self):
        state = np.random.RandomState(3)
        first, second = check_rng(state).random(), check_rng(state).random()
        assert first != second
        assert check_rng(np.random.RandomState(3)).random() == first

    def test_none_is_fresh(self):
        assert check_rng(None).random() != check_rng(None).random()

    @pytest.mark.parametrize("seed", [1.0, "1", True, np.bool_(True), [1], np.array([1])])
    def test_other_types(self, seed):
        with pytest.raises(ValueError, match=r"random_state=.* must be None, an int, a numpy Generator or a Random"):
            check_rng(seed, name="random_state")

    def test_negative(self):
        with pytest.raises(ValueError, match="rng=-1 must be a nonnegative integer"):
            check_rng(-1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_standard_normal_draws_the_same_numbers_everywhere(as_array, dtype):
    ref = as_array(np.ones(2), dtype)
    got = standard_normal(np.random.default_rng(5), (3, 4), ref)
    assert got.dtype == ref.dtype
    assert _xp.device(got) == _xp.device(ref)
    expected = np.random.default_rng(5).standard_normal((3, 4)).astype(dtype)
    np.testing.assert_array_equal(_xp.to_numpy(got), expected)
