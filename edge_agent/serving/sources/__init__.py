"""Inputs besides HTTP requests: cameras, addresses, folders, MQTT topics and sensors. One file for each kind.

A source returns the newest frame as encoded bytes, and raises an error when it is lost. It answers nothing and knows no
model. `feed` is the loop around a source: it reads a frame, answers it, waits, and reopens the source after it was
lost.

Read in this order: `source` (the contract), `loop` (what all loops share), `feed` (the loop around a source), `choose`
(creates the source that an option names), then the kinds: `rpicam`, `capture`, `snapshot`, `folder` and `mqtt_in`.
Sensors deliver samples instead of frames: `samples` (parses lines of numbers) and `sensor_feed` (the loop that cuts
windows from them). `stream` yields the answers to one source to a Python program.
"""
