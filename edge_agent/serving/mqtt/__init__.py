"""Answers as MQTT messages, with which Home Assistant finds them by itself. No other program is needed for that.

`topics` names where everything is published, `discovery` describes it to Home Assistant, and `publisher` sends both,
and sends them again whenever the broker or Home Assistant has started anew.

Read in this order: `topics`, `discovery`, `publisher`.
"""
