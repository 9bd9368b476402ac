"""`tq` as a terminal starts it, where Ctrl-C ends it."""

# Python installs no handler of its own where its parent ignores SIGINT, as a shell's background jobs do.
AS_IN_A_TERMINAL = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from tq.cli import main; sys.exit(main(sys.argv[1:]))"
)
"""For `python -c`; arguments follow."""
