"""Large blobs over MQTT: cut into chunks, sent at the rate that a link takes, asked for again where they are lost.

Read `chunks` (frames and assembly on disk) before `flow` (when what is sent).
"""
