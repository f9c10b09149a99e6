"""Rounds as programs: functions of trees, traced once and run as flat lists of operations."""
