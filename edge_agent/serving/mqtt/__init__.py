"""Publishes answers over MQTT, and describes the device so that Home Assistant finds it. No other program is needed.

`topics` defines where messages are published. `discovery` builds the message that describes the device. `publisher`
sends both, and sends them again whenever the broker or Home Assistant has restarted.

Read in this order: `topics`, `discovery`, `publisher`, `login` (what to do when the broker refuses the login).
"""
