import sys

import numpy as np
import pytest

from isogeom.plotting import TangentAlignmentDisplay
from isogeom.tangent import TangentProxy, tangent_alignment_test

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")


@pytest.fixture(scope="module")
def results():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((300, 8)) * np.arange(8, 0, -1)
    proxy = TangentProxy(n_directions=2).fit(X)
    pairs = [("T1_in", "early"), ("T1_in", "late"), ("Tl", "early")]
    return {pair: tangent_alignment_test(rng.standard_normal((200, 8)), proxy, rng=i) for i, pair in enumerate(pairs)}


def test_bars_have_the_values_of_the_results(results):
    display = TangentAlignmentDisplay.from_results(results).plot()
    ratios, changes = display.axes_
    tops = sorted(bar.get_y() + bar.get_height() for bar in ratios.patches)
    assert tops == pytest.approx(sorted(r.energy_ratio for r in results.values()))
    heights = [bar.get_height() for bar in changes.patches if np.isfinite(bar.get_height())]
    expected = [getattr(r, f"delta_isotropy_{which}") for r in results.values() for which in ("tangent", "normal")]
    assert sorted(heights) == pytest.approx(sorted(expected))
    assert [tick.get_text() for tick in ratios.get_xticklabels()] == ["T1_in", "Tl"]
    labels = [text.get_text() for text in ratios.get_legend().get_texts()]
    assert labels == ["early", "late", "null, central 95 %"]


def test_null_band_is_the_central_part_of_the_draws(results):
    display = TangentAlignmentDisplay.from_results(results)
    r = results["Tl", "early"]
    low, high = display.null_band("Tl", "early")
    inside = (r.null_distribution / r.share_normal >= low) & (r.null_distribution / r.share_normal <= high)
    assert inside.mean() == pytest.approx(0.95, abs=0.005)


def test_draws_on_given_axes_without_pyplot(results):
    from matplotlib.figure import Figure

    axes = Figure().subplots(2, 1)
    display = TangentAlignmentDisplay.from_results(results).plot(axes=axes)
    assert display.axes_[0] is axes[0]
    assert display.figure_ is axes[0].figure
    with pytest.raises(ValueError, match="axes must hold 2 axes, got 1"):
        display.plot(axes=axes[0])


def test_infinite_ratios_and_undefined_changes_are_left_out():
    axis = TangentProxy(n_directions=1).fit(np.random.default_rng(0).standard_normal((9, 4)) * [9, 0, 0, 0])
    result = tangent_alignment_test(np.eye(4)[:1] * [[1.0], [2.0]], axis, rng=0)
    display = TangentAlignmentDisplay.from_results({("T1_in", "early"): result})
    assert display.null_band("T1_in", "early") is None
    assert len(display.plot().axes_[0].patches) == 0


def test_bad_input_is_named(results):
    with pytest.raises(TypeError, match="results must be a mapping"):
        TangentAlignmentDisplay.from_results(list(results.values()))
    with pytest.raises(ValueError, match="results is empty"):
        TangentAlignmentDisplay({})
    with pytest.raises(ValueError, match="results is empty"):
        TangentAlignmentDisplay.from_results({})
    with pytest.raises(ValueError, match="'T1_in'"):
        TangentAlignmentDisplay.from_results({"T1_in": next(iter(results.values()))})
    with pytest.raises(TypeError, match="must be a TangentAlignmentResult, got int"):
        TangentAlignmentDisplay.from_results({("T1_in", "early"): 3})


def test_a_missing_matplotlib_names_the_extra(results, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"isogeom\[plot\]"):
        TangentAlignmentDisplay.from_results(results).plot()
