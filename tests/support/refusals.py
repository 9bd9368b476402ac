"""What every command does with a mistake of its user."""


def snapshot(folder):
    """Every file of a folder, by size and time."""
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


def assert_refused(ran, *words):
    """Exit code 2, nothing on stdout, and one line on stderr that holds these words; `ran` is (code, stdout, stderr)."""
    code, out, err = ran
    assert (code, out) == (2, "")
    assert err.startswith("tq: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    for word in words:
        assert str(word) in err
