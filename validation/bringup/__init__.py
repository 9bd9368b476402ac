"""The first hour on a new machine: a ladder of rungs, each with a verdict of its own. `tq dev bringup` climbs it."""
