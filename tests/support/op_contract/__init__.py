"""The contract of an op table: every op of every table against the reference.

`cases`, `caches` and `delta` have the kinds of cases, `suite` the tables and the cases themselves.
"""
