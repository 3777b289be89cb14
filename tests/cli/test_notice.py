"""``clusterd notice``: a word to all users."""

from __future__ import annotations

import json

from clusterd.tui.model import view
from clusterd.tui.model.model import Model
from tests.conftest import RunningCluster


def test_a_notice_is_shown_to_all_until_it_is_taken_back(shared_cluster: RunningCluster) -> None:
    cluster = shared_cluster
    assert cluster.run("notice").stdout == "there is no notice\n"
    cluster.run("notice", "gpu03 gets a new fan on Friday")
    assert "gpu03 gets a new fan on Friday" in cluster.run("ls").stderr
    assert json.loads(cluster.run("ls", "-o", "json").stdout) == []
    with cluster.client() as client:
        baseline = next(iter(client.stream("watch")))
    model = Model()
    model.apply(baseline)
    assert "gpu03 gets a new fan on Friday" in view.banner(view.Link(), model, 0.0)
    cluster.run("stop")
    cluster.run("start")
    assert "new fan on Friday" in cluster.run("notice").stdout
    cluster.run("notice", "--clear")
    assert "Friday" not in cluster.run("ls").stderr
    assert "one line" in cluster.run("notice", "two\nlines", check=False).stderr
