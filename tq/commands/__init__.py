"""One thin module a subcommand."""
