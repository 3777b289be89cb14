"""Working directories of users: unusual files, two submits at once, unreadable folders."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import tarfile
from pathlib import Path

import pytest

from clusterd.client import Client
from clusterd.errors import ClusterError, UsageError
from clusterd.submission.workdir import pack
from tests.conftest import RunningCluster

LIMIT = 1 << 20


def git(directory: Path, *arguments: str) -> None:
    """Run git with settings that allow submodules from a local path."""
    settings = ("user.name=a", "user.email=a@example.org", "protocol.file.allow=always")
    options = [word for setting in settings for word in ("-c", setting)]
    subprocess.run(["git", *options, "-C", str(directory), *arguments], check=True, capture_output=True)


def repository(directory: Path, *files: str) -> Path:
    """A git repository that tracks these files."""
    directory.mkdir()
    git(directory, "init")
    for file in files:
        (directory / file).touch()
        git(directory, "add", file)
    git(directory, "commit", "--allow-empty", "-m", "begin")
    return directory


def names(directory: Path) -> list[str]:
    with pack(directory, LIMIT).archive as packed, tarfile.open(fileobj=packed) as archive:
        return sorted(archive.getnames())


@pytest.mark.parametrize("in_git", [True, False])
def test_a_link_to_where_nobody_may_look_goes_as_the_link_it_is(tmp_path: Path, in_git: bool) -> None:
    """Regression: a link into another user's private directory made submit report a bug of its own."""
    work = repository(tmp_path / "work") if in_git else tmp_path / "work"
    work.mkdir(exist_ok=True)
    (work / "data").symlink_to("x" * 300)  # the system refuses to look at that for anybody
    assert names(work) == ["data"]


def test_what_is_no_file_stays_behind(tmp_path: Path) -> None:
    """A FIFO, a socket, and links in circles beside the script."""
    (tmp_path / "train.py").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "self").symlink_to(".")
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "sock"))
        assert "train.py" in names(tmp_path)
        assert not {"fifo", "sock"} & set(names(tmp_path))


def test_a_link_to_a_directory_goes_as_a_link(tmp_path: Path) -> None:
    """Without git as with it; what it points to goes once, and an excluded link stays."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").touch()
    (tmp_path / "current").symlink_to("data")
    (tmp_path / "scratch").symlink_to("data")
    (tmp_path / ".clusterdignore").write_text("scratch\n")
    with pack(tmp_path, LIMIT).archive as packed, tarfile.open(fileobj=packed) as archive:
        assert sorted(archive.getnames()) == [".clusterdignore", "current", "data/a.txt"]
        assert archive.getmember("current").issym()
        assert archive.getmember("current").linkname == "data"


def test_repositories_within_a_repository_go_with_it(tmp_path: Path) -> None:
    """A submodule, one within it, and a clone that is none; each leaves out what its own .gitignore names."""
    deepest = repository(tmp_path / "deepest", "deep.py")
    library = repository(tmp_path / "library", "lib.py")
    git(library, "submodule", "add", str(deepest), "deepest")
    git(library, "commit", "-m", "with a submodule")
    work = repository(tmp_path / "work", "train.py")
    git(work, "submodule", "add", str(library), "third/library")
    git(work, "submodule", "update", "--init", "--recursive")
    (work / "third" / "library" / "edited.py").touch()
    clone = repository(work / "clone", "cloned.py", ".gitignore")
    (clone / ".gitignore").write_text("*.pt\n")
    (clone / "weights.pt").touch()
    ours = {".gitmodules", "train.py", "clone/.gitignore", "clone/cloned.py"}
    third = {".gitmodules", "edited.py", "lib.py", "deepest/deep.py"}
    assert set(names(work)) == ours | {f"third/library/{name}" for name in third}
    (work / ".clusterdignore").write_text("library\ncloned.py\n")
    assert set(names(work)) == (ours | {".clusterdignore"}) - {"clone/cloned.py"}


def test_a_submodule_that_is_not_there_is_missed_here_and_not_on_the_host(tmp_path: Path) -> None:
    """After a clone without --recurse-submodules."""
    library = repository(tmp_path / "library", "lib.py")
    work = repository(tmp_path / "work", "train.py")
    git(work, "submodule", "add", str(library), "library")
    git(work, "submodule", "deinit", "--force", "library")
    with pytest.raises(UsageError, match=r"the submodule .*/work/library is empty: git submodule update --init, or"):
        pack(work, LIMIT)
    (work / ".clusterdignore").write_text("library/\n")
    assert names(work) == [".clusterdignore", ".gitmodules", "train.py"]
    (work / "library" / "lib.py").touch()  # copied here without its .git
    (work / ".clusterdignore").unlink()
    assert names(work) == [".gitmodules", "library/lib.py", "train.py"]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("owner", "detected dubious ownership in repository .* git config --global --add safe.directory"),
        ("settings", "bad config line .* in file"),
        ("link", "not a git repository: /gone/worktree"),
    ],
)
def test_where_git_refuses_a_repository_nothing_it_ignores_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, message: str
) -> None:
    """Git's error message is shown; without its .gitignore, secrets would be sent to the hosts."""
    work = repository(tmp_path / "work", "train.py", ".gitignore")
    (work / ".gitignore").write_text(".env\n")
    (work / ".env").touch()
    assert names(work) == [".gitignore", "train.py"]
    if broken == "owner":
        monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    elif broken == "settings":
        (work / ".git" / "config").write_text("[")
    else:
        (work / ".git").rename(tmp_path / "elsewhere")
        (work / ".git").write_text("gitdir: /gone/worktree\n")
    with pytest.raises(UsageError, match=f"git does not list its files: .*{message}"):
        pack(work, LIMIT)


def test_where_there_is_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No repository, or a repository and no program: everything goes."""
    (tmp_path / "train.py").touch()
    assert names(tmp_path) == ["train.py"]
    git(tmp_path, "init")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert names(tmp_path) == ["train.py"]


@pytest.mark.parametrize("files", [("daemon.lock", "journal.db"), ("agent.lock", "identity.json")])
@pytest.mark.parametrize("in_git", [False, True])
def test_the_state_of_daemons_and_agents_is_left_out(tmp_path: Path, in_git: bool, files: tuple[str, str]) -> None:
    """Regression: a job submitted from a home that is a host's, too, sent the directories of all jobs before it."""
    if in_git:
        git(tmp_path, "init")
    state = tmp_path / "state [1]"
    for folder in (state, state / "snapshots", tmp_path / "src" / state.name):
        folder.mkdir(parents=True)
        (folder / "a").touch()
    for file in files:
        (state / file).touch()
    (tmp_path / "src" / files[0]).touch()
    assert names(tmp_path) == sorted([f"src/{files[0]}", "src/state [1]/a"])
    assert names(state) == sorted(["a", *files])  # asked for by name, but not for what it holds of others
    assert names(state / "snapshots") == ["a"]


def test_running_from_a_home_directory(cluster: RunningCluster) -> None:
    """A daemon without settings keeps its state below the home directory."""
    cluster.environment["CLUSTERD_SOCKET"] = str(cluster.socket)
    cluster.environment["CLUSTERD_STATE_DIR"] = str(cluster.directory / "home" / ".local" / "state")
    cluster.start()
    (cluster.directory / "home" / "train.py").touch()
    message = cluster.run("run", "--detach", "--", "true", cwd=cluster.directory / "home").stderr
    assert "sending 1 file" in message


def test_an_ignore_file_that_is_none(tmp_path: Path) -> None:
    """Binary, a folder, a FIFO that nobody writes into, a link to itself."""
    file = tmp_path / ".clusterdignore"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"\.clusterdignore cannot be read: it is no UTF-8 text"):
        pack(tmp_path, LIMIT)
    file.unlink()
    for make in (file.mkdir, lambda: os.mkfifo(file), lambda: file.symlink_to(file.name)):
        make()
        with pytest.raises(UsageError, match=r"\.clusterdignore cannot be read: it is no file"):
            pack(tmp_path, LIMIT)
        file.rmdir() if file.is_dir() else file.unlink()


def test_a_folder_that_cannot_be_read_is_not_left_out_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job would miss it only on its host."""
    (tmp_path / "private").mkdir()
    (tmp_path / "train.py").touch()
    real = os.scandir

    def scandir(path: str) -> object:
        if os.fspath(path).endswith("private"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UsageError, match=r"private cannot be read: Permission denied: make it readable, or exclude"):
        pack(tmp_path, LIMIT)
    (tmp_path / ".clusterdignore").write_text("private\n")
    assert names(tmp_path) == [".clusterdignore", "train.py"]


def test_a_dry_run_refuses_what_a_submit_refuses(cluster: RunningCluster) -> None:
    """A workdir that is not there, one with our module, one that is too large; unless it is not sent at all."""
    cluster.environment["CLUSTERD_CONFIG"] = str(cluster.directory / "clusterd.toml")
    (cluster.directory / "clusterd.toml").write_text('[daemon]\nworkdir_max = "1KB"\n')
    cluster.start()
    work = cluster.directory / "work"
    file = cluster.directory / "job.toml"
    file.write_text('workdir = "work"\ncommand = ["true"]\n')
    elastic = cluster.directory / "elastic.toml"
    elastic.write_text(f'kind = "elastic"\nresources = {{ devices = 1 }}\n{file.read_text()}')

    def refused(file: Path = file) -> str:
        dry, real = (cluster.run("submit", *given, str(file), check=False) for given in (["--dry-run"], []))
        assert (dry.returncode, dry.stderr) == (real.returncode, real.stderr)
        assert (dry.returncode, dry.stdout) == (2, "")
        return dry.stderr

    assert "is no directory" in refused()
    work.mkdir()
    (work / "clusterd.py").touch()
    assert "has a module 'clusterd'" in refused(elastic)
    (work / "clusterd.py").rename(work / "planning.py")
    assert "job would be queued" in cluster.run("submit", "--dry-run", str(file)).stdout
    (work / "planning.py").write_bytes(bytes(2000))
    assert "the limit is" in refused()
    (work / "planning.py").write_bytes(bytes(200))
    file.write_text(f"snapshots = 5\n{file.read_text()}")
    assert "snapshots means nothing to a command" in refused(), "before its files are sent"
    (work / "planning.py").write_bytes(bytes(2000))
    over = cluster.run("run", "--dry-run", "--", "true", cwd=work, check=False)
    assert (over.returncode, "the limit is" in over.stderr) == (2, True)
    assert "would be queued" in cluster.run("run", "--dry-run", "--no-snapshot", "--", "true", cwd=work).stdout
    assert not list((cluster.directory / "snapshots").glob("*"))


def test_two_send_the_same_directory_at_once(cluster: RunningCluster) -> None:
    """Chunk by chunk in turn; a third one hangs up half-way and leaves nothing behind."""
    cluster.start()
    content = os.urandom(3000)
    digest = hashlib.sha256(content).hexdigest()
    with Client(cluster.socket) as one, Client(cluster.socket) as other, Client(cluster.socket) as third:
        third.call("snapshot_put", digest=digest, offset=0, data=content[:1000], last=False)
        for offset in range(0, 3000, 1000):
            for client in (one, other):
                chunk = content[offset : offset + 1000]
                client.call("snapshot_put", digest=digest, offset=offset, data=chunk, last=offset == 2000)
        with pytest.raises(ClusterError, match="out of order"):
            third.call("snapshot_put", digest=digest, offset=7, data=b"x", last=False)
        assert one.call("snapshot_has", digest=digest)["have"]
    cluster.run("stop")
    assert [file.name for file in (cluster.directory / "snapshots").iterdir()] == [f"{digest}.tar"]


def test_a_directory_that_goes_while_it_is_packed_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running job may remove directories meanwhile; regression: the error asked to make it readable."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "gone").mkdir()
    is_link = os.path.islink

    def removed(path: str) -> bool:
        if str(path).endswith("gone") and os.path.lexists(path):
            Path(path).rmdir()
        return is_link(path)

    monkeypatch.setattr(os.path, "islink", removed)
    packed = pack(tmp_path, LIMIT)
    packed.archive.close()
    assert packed.files == 1


def test_a_file_that_goes_while_it_is_packed_is_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: an editor that writes and renames files beside the code made submit fail."""
    for name in ("model.py", "newest.pt.part", "train.py"):
        (tmp_path / name).write_text("")
    read = Path.read_bytes

    def removed(path: Path) -> bytes:
        (tmp_path / "newest.pt.part").unlink(missing_ok=True)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", removed)
    packed = pack(tmp_path, LIMIT)
    with packed.archive as file, tarfile.open(fileobj=file) as archive:
        assert archive.getnames() == ["model.py", "train.py"]
    assert packed.files == 2


def test_secrets_stay_behind_unless_git_tracks_them_or_the_ignore_file_asks(tmp_path: Path) -> None:
    for name in ("train.py", ".env", "key.pem", ".env.example"):
        (tmp_path / name).touch()
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").touch()
    assert names(tmp_path) == [".env.example", "train.py"]
    packed = pack(tmp_path, LIMIT)
    packed.archive.close()
    assert packed.secrets == (".env", ".ssh/config", "key.pem")
    (tmp_path / ".clusterdignore").write_text("!.env\n")
    assert names(tmp_path) == [".clusterdignore", ".env", ".env.example", "train.py"]
    tracked = repository(tmp_path / "tracked", "train.py", "test.pem")
    (tracked / ".env").touch()
    assert names(tracked) == ["test.pem", "train.py"]


@pytest.mark.parametrize("in_git", [False, True])
def test_the_ignore_file_follows_the_rules_of_gitignore(tmp_path: Path, in_git: bool) -> None:
    """Anchors, folders, negations and double stars mean the same with and without git."""
    paths = ("data/big.bin", "src/data/small.bin", "out/a.log", "out/keep.log", "build", "deep/er/x.tmp", "a[1].txt")
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    if in_git:
        git(tmp_path, "init")
    (tmp_path / ".clusterdignore").write_text("# comment\n/data/\n*.log\n!keep.log\nbuild/\ndeep/**/*.tmp\n")
    expected = [".clusterdignore", "a[1].txt", "build", "out/keep.log", "src/data/small.bin"]
    assert [name for name in names(tmp_path) if not name.endswith("er")] == expected


def test_a_hook_of_another_repository_does_not_decide_what_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: with GIT_DIR of a commit hook, git listed ignored files and secrets as if they were not."""
    work = repository(tmp_path / "work", "train.py", ".gitignore")
    (work / ".gitignore").write_text("*.bin\n")
    (work / "weights.bin").touch()
    other = repository(tmp_path / "other", "x.py")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    assert names(work) == [".gitignore", "train.py"]


def test_times_modes_and_empty_folders_survive(cluster: RunningCluster, tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "empty").mkdir(parents=True)
    (work / "key").write_text("k")
    (work / "key").chmod(0o600)
    os.utime(work / "key", (1_000_000_000, 1_000_000_000))
    (work / "later").write_text("x")
    os.utime(work / "later", (4_000_000_000, 4_000_000_000))  # a clock that is ahead
    cluster.run("start", "--local", "1")
    script = "stat -c '%a %Y' key; ls -d empty; cp -p key made"
    done = cluster.run("run", "--name", "j", "--", "sh", "-c", script, cwd=work)
    assert done.stdout.splitlines() == ["600 1000000000", "empty"]
    listed = json.loads(cluster.run("get", "j", "-o", "json").stdout)
    assert [file["path"] for file in listed] == ["made"]


def test_what_looks_like_a_secret_stays_behind_unless_it_is_named(tmp_path: Path) -> None:
    """By the names that tools give, and by the form of tokens in small files."""
    known = (
        "kaggle.json", ".huggingface/token", ".npmrc", ".s3cfg", "credentials.json", "my-service-account.json",
        ".vault-token", ".streamlit/secrets.toml", "terraform.tfstate", "terraform.tfstate.backup",
    )  # fmt: skip
    for name in known:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    tokens = {"notes.txt": "hf_" + "a" * 34, "sub/cloud.ini": "AKIA" + "B" * 16, "wanted.txt": "gh" + "p_" + "c" * 36}
    (tmp_path / "sub").mkdir()
    for name, token in tokens.items():
        (tmp_path / name).write_text(f"login = {token}\n")
    (tmp_path / "train.py").write_text("tokenizer_file = 'tokenizer.json'\n")
    (tmp_path / ".clusterdignore").write_text("!wanted.txt\n")
    packed = pack(tmp_path, LIMIT)
    packed.archive.close()
    assert packed.secrets == tuple(sorted({*known, *tokens} - {"wanted.txt"}))
    assert {"train.py", "wanted.txt"} <= set(names(tmp_path))


def test_a_ceiling_does_not_hide_the_rules_of_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("data/\n")
    work = tmp_path / "work"
    (work / "data").mkdir(parents=True)
    (work / "data" / "large").touch()
    (work / "train.py").touch()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert names(work) == ["train.py"]


def test_a_home_is_refused_before_all_of_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: `clusterd run` in a home of 180,000 files said nothing for 80 s, then that it is too large."""
    monkeypatch.setattr("clusterd.submission.workdir.TELLING_FILES", 3)
    for folder in range(5):
        (tmp_path / str(folder)).mkdir()
        (tmp_path / str(folder) / "data").write_bytes(bytes(LIMIT))
    with pytest.raises(
        UsageError, match=r"has 3.0 MiB in the first 3 files, .* submit from the folder of the job's code"
    ):
        pack(tmp_path, LIMIT)


def test_what_is_left_out_below_a_folder_is_told_by_the_folder_alone(tmp_path: Path) -> None:
    (tmp_path / ".clusterdignore").write_text("/data/\n!keep.pem\n")
    for file in ("data/a/b", "src/data/c", "src/keep.pem", "src/.aws/deep/config", "src/x.pem"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert names(tmp_path) == [".clusterdignore", "src/data/c", "src/keep.pem"]
