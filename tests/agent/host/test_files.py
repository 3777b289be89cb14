"""Files of a job's working directory can be read, and no others."""

from __future__ import annotations

import shutil

import pytest

from tests.agent.client import AgentClient

WRITES = (
    "echo mine > own; mkdir -p __pycache__ d; echo > __pycache__/x.pyc; ln -s /etc d/away; ln -s /etc/hostname leak"
)

LISTENS = "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")'"


def test_a_file_is_read_in_pieces(agent: AgentClient) -> None:
    agent.launch(["sh", "-c", WRITES])
    agent.event("rank_exited")
    listed = agent.ok("files", job="j", attempt=1)
    assert [(f["path"], f["bytes"]) for f in listed["files"]] == [("own", 5)]
    assert listed["more"] == 0
    chunks = [agent.ok("file", job="j", attempt=1, path="own", offset=at, limit=3) for at in (0, 3, 5, 99)]
    assert [piece["data"] for piece in chunks] == [b"min", b"e\n", b"", b""]
    assert {piece["size"] for piece in chunks} == {5}


def test_files_that_were_deleted_by_hand_are_gone(agent: AgentClient) -> None:
    """The host could not say what it had, for ever."""
    agent.launch(["true"])
    agent.event("rank_exited")
    shutil.rmtree(agent.root / "attempts" / "j.1")
    assert agent.ok("files", job="j", attempt=1) == {"files": [], "more": 0}


def test_logs_of_earlier_generations_are_listed_and_read(agent: AgentClient) -> None:
    """A job that was moved since, or was to be moved and was not, seemed to have written nothing."""
    agent.launch(["sh", "-c", "echo 2 > own"], generation=2)  # the first one was on another host
    agent.event("rank_exited")
    agent.launch(["sh", "-c", "cat own > later"], generation=3)
    agent.event("rank_exited", generation=3)
    listed = agent.ok("files", job="j", attempt=1)["files"]
    assert [(f["path"], f["bytes"]) for f in listed] == [("later", 2), ("own", 2)]
    assert agent.ok("file", job="j", attempt=1, path="own", offset=0, limit=99)["data"] == b"2\n"


def test_a_link_to_a_file_of_the_job_is_that_file(agent: AgentClient) -> None:
    """Regression: the file could be read but was not listed, and `clusterd get` reported it as not written."""
    agent.launch(["sh", "-c", "echo mine > s1.pt; ln -s s1.pt last.pt; ln -s none gone; ln -s loop loop; ln -s . here"])
    assert agent.event("rank_exited")["exit_code"] == 0
    listed = agent.ok("files", job="j", attempt=1)["files"]
    assert [(f["path"], f["bytes"]) for f in listed] == [("last.pt", 5), ("s1.pt", 5)]
    assert agent.ok("file", job="j", attempt=1, path="last.pt", offset=0, limit=99)["data"] == b"mine\n"


@pytest.mark.parametrize(("path", "make"), [("pipe", "mkfifo pipe"), ("socket", LISTENS)])
def test_special_files_are_neither_listed_nor_read(agent: AgentClient, path: str, make: str) -> None:
    """Nor waited for: the agent answers whatever else is asked."""
    agent.launch(["sh", "-c", make])
    assert agent.event("rank_exited")["exit_code"] == 0
    assert agent.ok("files", job="j", attempt=1)["files"] == []
    asked = [agent.send("file", job="j", attempt=1, path=path, offset=0, limit=100) for _ in range(40)]
    agent.ok("facts")  # from the same threads
    for number in asked:
        assert agent.reply(number)["error"]["kind"] == "path"


@pytest.mark.parametrize("path", ["leak", "d/away/hostname", "../launch.msgpack", "/etc/hostname", "none", "d"])
def test_nothing_outside_is_read(agent: AgentClient, path: str) -> None:
    agent.launch(["sh", "-c", WRITES])
    agent.event("rank_exited")
    refused = agent.refused("file", job="j", attempt=1, path=path, offset=0, limit=100)
    assert refused["kind"] == "path"
