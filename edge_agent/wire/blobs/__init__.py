"""Large blobs over MQTT: cut into chunks, sent at the rate that a link takes, and requested again where they are lost.

Read in this order: `chunks` (frames and assembly on disk), `flow` (which chunks are sent when). Who sends which blob to
whom, and when to give up, is decided by the two programs that use it.
"""
