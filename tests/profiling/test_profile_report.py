"""Reports show measurements, fits and predictions, and need no other file."""

from __future__ import annotations

from xml.etree import ElementTree

from clusterd.profiling.coefficients import NAMES, Prior
from clusterd.profiling.curves import packed
from clusterd.profiling.fit import fit
from clusterd.profiling.model import Rows
from clusterd.profiling.report import curve_svg, lines, quantity, scatter_svg, to_html
from tests.profiling.worlds import TRANSFORMER, measured, over_devices, plans_on, truth

TABLE = measured(truth(), TRANSFORMER)
ROWS = [m.row for m in TABLE]
FIT = fit(Rows.of(ROWS[:10]), [m.step_time_s for m in TABLE[:10]], Prior.typical())
LINES = lines(FIT, ROWS[:12], [m.step_time_s if i < 10 else None for i, m in enumerate(TABLE[:12])])
CURVE = over_devices(FIT, TRANSFORMER, lambda n: plans_on(packed(n, 8).counts, TRANSFORMER), [1, 2, 4, 8, 16], 8)


def test_lines_are_fastest_first_and_know_their_error():
    assert [line.predicted_s for line in LINES] == sorted(line.predicted_s for line in LINES)
    assert sum(line.error is None for line in LINES) == 2
    assert lines(FIT, [], []) == []


def test_where_a_step_goes_is_told_longest_first():
    phases = (("input", 0.0001), ("forward", 0.03), ("backward", 0.06), ("optimizer", 0.01))
    first, other = lines(FIT, ROWS[:2], [0.1, 0.2], {ROWS[0]: phases})
    answer = {line.plan: line.spent for line in (first, other)}
    assert answer[str(ROWS[0].plan)] == "backward 60%, forward 30%, optimizer 10%", "a thousandth is left out"
    assert sorted(answer.values())[0] == "", "nothing is said of what was not timed"
    assert "backward 60%" in to_html("gpt", FIT, [first, other])


def test_the_page_loads_nothing_and_escapes_names():
    page = to_html("<gpt> & co", FIT, LINES, CURVE)
    assert "&lt;gpt&gt; &amp; co" in page and "<script" not in page
    assert "src=" not in page and "href=" not in page
    assert page.count("<svg") == 2
    assert all(name in page for name in NAMES)


def test_drawings_are_well_formed():
    for drawing in (scatter_svg([x for x in LINES if x.measured_s is not None]), curve_svg(CURVE)):
        tree = ElementTree.fromstring(drawing)
        assert tree.tag.endswith("svg")
        assert sum(e.tag.endswith("circle") for e in tree.iter()) >= 4


def test_figures_are_readable():
    assert quantity(1.2e10, "byte/s") == "12 Gbyte/s"
    assert quantity(0.002, "s") == "2 ms"
    assert quantity(0.0004, "s per layer and micro-batch") == "400 us per layer and micro-batch"
