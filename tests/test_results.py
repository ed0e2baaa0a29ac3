import dataclasses
import sys

import numpy as np
import pytest

from isogeom._results import Result, _require, format_value


@dataclasses.dataclass(frozen=True)
class Score(Result):
    name: str
    value: float
    pvalue: float | None
    draws: np.ndarray = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class OnlyArrays(Result):
    draws: np.ndarray


@pytest.fixture
def score():
    return Score("a<b", 0.123456789, None, np.arange(3))


class TestResult:
    def test_frozen(self, score):
        with pytest.raises(dataclasses.FrozenInstanceError):
            score.value = 1.0

    def test_to_dict_leaves_arrays_out(self, score):
        assert score.to_dict() == {"name": "a<b", "value": 0.123456789, "pvalue": None}

    def test_text(self, score):
        assert str(score).splitlines() == ["Score", "  name    a<b", "  value   0.1235", "  pvalue  -"]
        assert str(OnlyArrays(np.ones(2))) == "OnlyArrays"

    def test_html_is_escaped(self, score):
        page = score._repr_html_()
        assert "<caption>Score</caption>" in page
        assert "<td>a&lt;b</td>" in page
        assert page.count("<tr>") == 3

    def test_frame(self, score):
        pytest.importorskip("pandas")
        frame = score.to_frame()
        assert frame.shape == (1, 3)
        assert list(frame.columns) == ["name", "value", "pvalue"]
        assert frame["value"][0] == 0.123456789

    def test_frame_without_pandas(self, score, monkeypatch):
        monkeypatch.setitem(sys.modules, "pandas", None)
        with pytest.raises(ImportError, match=r"to_frame\(\) needs pandas: pip install 'isogeom\[\w+\]'") as caught:
            score.to_frame()
        assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"),
        (0.123456, "0.1235"),
        (np.float32(1 / 3), "0.3333"),
        (1e-9, "1e-09"),
        (float("nan"), "nan"),
        (12345, "12345"),
        (True, "True"),
        ("text", "text"),
    ],
)
def test_format_value(value, expected):
    assert format_value(value) == expected


def test_require():
    assert _require("math", "this", "all").sqrt(4) == 2
    with pytest.raises(ImportError, match=r"this needs no_such_module_1: pip install 'isogeom\[plot\]'"):
        _require("no_such_module_1", "this", "plot")
