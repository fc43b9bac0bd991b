"""Where agents fetch large blobs by HTTP: the coordinator's own endpoint, an object store, or a folder that is served.

Each of them is a class behind the contract `coordinator.fleet.blob_urls`; which one is used is said by ``[blobs]`` of
the configuration. Nothing here knows of rounds or runs, and nothing here is needed: a blob that cannot be fetched goes
in chunks over MQTT.

Read in this order: `signing` (short-lived paths with a proof), `http_requests` (what the endpoint reads and answers),
`endpoint` (the coordinator's own), `object_store` (S3 and what else fsspec reaches), and `opening` (which one it is).
"""
