"""Where inputs come from besides requests: cameras, addresses, folders, topics and sensors. One file for each kind.

A source gives the newest frame that there is, as encoded bytes, and says when it is lost; it answers nothing and knows
no model. `feed` asks it, answers, waits, and opens it again when it was lost.

Read in this order: `source` (the contract), `feed` (the loop around a source), `choose` (text of the command line to a
source), then the kinds: `rpicam`, `capture`, `snapshot`, `folder` and `mqtt_in`. Sensors give samples and not frames:
`samples` (lines of numbers) and `sensor_feed` (the loop that cuts windows from them). What both loops share is in
`loop`; `stream` gives a program the answers to a source one by one.
"""
