"""Directories and files that another account could change are refused, whoever made them first."""

from __future__ import annotations

import ast
import os
import struct
from pathlib import Path

import pytest

from clusterd.trusted_paths import (
    UnsafePath,
    check_file,
    check_parents,
    content_digest,
    own_directory,
    private_directory,
)
from tests.conftest import REPOSITORY

SOMEBODY = 4242
"""User id of an account that is not ours; files can be given to it by root alone."""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="gives files to another account: needs root")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_a_private_directory_is_made_with_those_above_it(tmp_path: Path) -> None:
    private_directory(str(tmp_path / "a/b/c"))
    assert mode(tmp_path / "a/b/c") == mode(tmp_path / "a") == 0o700
    private_directory(str(tmp_path / "a/b/c"))


def test_one_of_ours_that_others_could_only_read_is_closed(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    own_directory(str(tmp_path / "open"))
    assert mode(tmp_path / "open") == 0o755
    private_directory(str(tmp_path / "open"))
    assert mode(tmp_path / "open") == 0o700


def test_one_that_must_be_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        private_directory(str(tmp_path / "absent"), make=False)
    assert not (tmp_path / "absent").exists()


def test_one_that_others_could_write_to_is_refused_as_they_may_have(tmp_path: Path) -> None:
    for bits in (0o777, 0o1777):
        (tmp_path / "open").mkdir(exist_ok=True)
        (tmp_path / "open").chmod(bits)
        with pytest.raises(UnsafePath, match=r"open can be written by others: see what is in it"):
            private_directory(str(tmp_path / "open"))


def test_a_shared_directory_above_needs_the_sticky_bit(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(UnsafePath, match=rf"{shared} can be written by others.*chmod \+t {shared}"):
        private_directory(str(shared / "mine"))
    assert not (shared / "mine").exists()
    shared.chmod(0o1777)
    private_directory(str(shared / "mine"))


@needs_root
@pytest.mark.parametrize("place", ["there", "there/below", "link", "link/below"])
def test_a_directory_or_a_link_of_somebody_else_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    there, link = tmp_path / "shared/there", tmp_path / "shared/link"
    (there / "below").mkdir(parents=True)
    link.symlink_to(tmp_path)
    os.chown(there, SOMEBODY, SOMEBODY)
    os.lchown(link, SOMEBODY, SOMEBODY)
    with pytest.raises(UnsafePath, match=rf"shared/\w+ (belongs to|is a link made by) {SOMEBODY}"):
        private_directory(str(tmp_path / "shared" / place))
    with pytest.raises(UnsafePath):
        check_parents(str(tmp_path / "shared" / place / "socket"))


def test_links_of_ours_are_followed_and_their_targets_checked(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to("disk/../disk")
    private_directory(str(tmp_path / "home/state"))
    assert (tmp_path / "disk/state").is_dir()
    (tmp_path / "disk").chmod(0o777)
    with pytest.raises(UnsafePath, match="disk can be written by others"):
        private_directory(str(tmp_path / "home/state"))
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="symbolic links"):
        private_directory(str(tmp_path / "round/state"))


@needs_root
def test_the_group_of_an_account_of_its_own_may_write_and_others_may_not(tmp_path: Path) -> None:
    """A mask of 002 is usual on systems that give each account a group."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o775)
    private_directory(str(tmp_path / "cache/mine"))
    os.chown(tmp_path / "cache", 0, SOMEBODY)
    (tmp_path / "cache").chmod(0o775)
    with pytest.raises(UnsafePath, match="cache can be written by others"):
        private_directory(str(tmp_path / "cache/mine"))


@needs_root
def test_rights_of_an_access_list_are_no_rights_of_the_group(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    owner, user, group, mask, others = 0x01, 0x02, 0x04, 0x10, 0x20  # as in linux/posix_acl.h
    entries = [(owner, 7, -1), (user, 7, SOMEBODY), (group, 0, -1), (mask, 7, -1), (others, 0, -1)]
    access_list = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(tmp_path / "cache", "system.posix_acl_access", access_list)
    except OSError as error:
        pytest.skip(f"access lists cannot be set here: {error}")
    with pytest.raises(UnsafePath):
        private_directory(str(tmp_path / "cache/mine"))


def test_a_file_that_others_can_change_or_replace_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "clusterd.toml"
    file.touch(mode=0o644)
    check_file(str(file))
    file.chmod(0o666)
    with pytest.raises(UnsafePath, match=f"chmod go-w {file}"):
        check_file(str(file))
    file.chmod(0o644)
    tmp_path.chmod(0o777)
    try:
        with pytest.raises(UnsafePath, match="could replace what is in it"):
            check_file(str(file))
    finally:
        tmp_path.chmod(0o700)


def test_the_digest_tells_names_and_contents_apart() -> None:
    digest = content_digest([("a", b"1"), ("b", b"2")])
    assert digest == content_digest([("b", b"2"), ("a", b"1")])
    others = [[("a", b"2"), ("b", b"1")], [("a", b"1")], [("a", b"1"), ("b", b"2"), ("c", b"")], [("a\nb", b"12")]]
    assert digest not in {content_digest(some) for some in others}


@pytest.mark.parametrize("file", ["clusterd/trusted_paths.py", "clusterd/ssh/stage1.py"])
def test_what_runs_before_a_python_is_found_is_parsed_by_an_old_one(file: str) -> None:
    ast.parse((REPOSITORY / file).read_text(), feature_version=(3, 6))
