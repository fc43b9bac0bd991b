"""Large blobs over MQTT: cut into chunks, sent at the rate that a link takes, and requested again where they are lost.

Read `chunks` (frames and assembly on disk) before `flow` (which chunks are sent when).
"""
