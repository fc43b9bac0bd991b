"""An S3-compatible server that checks signatures: moto's own check for requests, botocore's for presigned URLs.

moto compares the signature in the header of a request, and knows none in a URL. So a layer before it computes that of a
presigned URL by botocore, compares end, size and SHA-256 as S3 does, and hands the request on signed by its header.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import secrets
import threading
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import parse_qsl, urlencode

import pytest

RIGHTS = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}


class S3Site:
    """A server with a bucket ``models`` and two users: one with all rights there, one with none."""

    def __init__(self) -> None:
        backend = pytest.importorskip("moto.moto_server.werkzeug_app")
        serving = pytest.importorskip("werkzeug.serving")
        boto3 = pytest.importorskip("boto3")
        self._app = backend.DomainDispatcherApplication(backend.create_backend_app)
        self._server = serving.make_server("127.0.0.1", 0, self._serve, threaded=True)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self.refused: list[str] = []
        """Why presigned URLs were refused."""

        self.before: Callable[[dict[str, Any]], None] = lambda _: None
        """Called with each request before it is answered."""

        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        root = {"endpoint_url": self.address, "region_name": "us-east-1"}
        root |= {"aws_access_key_id": "root", "aws_secret_access_key": "root"}
        self._settings = pytest.importorskip("moto.settings")
        self._settings.INITIAL_NO_AUTH_ACTION_COUNT = float("inf")
        iam = boto3.client("iam", **root)
        self.keys: dict[str, tuple[str, str]] = {}
        for role in ("owner", "stranger"):
            user = f"{role}-{secrets.token_hex(4)}"
            iam.create_user(UserName=user)
            if role == "owner":
                iam.put_user_policy(UserName=user, PolicyName="all", PolicyDocument=json.dumps(RIGHTS))
            key = iam.create_access_key(UserName=user)["AccessKey"]
            self.keys[role] = (key["AccessKeyId"], key["SecretAccessKey"])
        boto3.client("s3", **root).create_bucket(Bucket="models")
        # From now on every request is checked.
        self._settings.INITIAL_NO_AUTH_ACTION_COUNT = 0

    def close(self) -> None:
        self._settings.INITIAL_NO_AUTH_ACTION_COUNT = float("inf")
        self._server.shutdown()
        self._server.server_close()

    def client(self, user: str = "owner") -> Any:
        """An independent client of the store."""
        boto3 = pytest.importorskip("boto3")
        key, secret = self.keys[user]
        session = boto3.session.Session(aws_access_key_id=key, aws_secret_access_key=secret, region_name="us-east-1")
        return session.client("s3", endpoint_url=self.address)

    def names(self, prefix: str = "") -> list[str]:
        """What is in the bucket below a prefix; moto keeps one bucket for all sites of a process."""
        found = self.client().list_objects_v2(Bucket="models", Prefix=prefix).get("Contents", [])
        return sorted(entry["Key"] for entry in found)

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        self.before(environ)
        query = dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True))
        if "X-Amz-Signature" in query:
            problem = self._check_presigned(environ, query)
            if problem:
                self.refused.append(problem)
                body = f"<Error><Code>AccessDenied</Code><Message>{problem}</Message></Error>".encode()
                start_response("403 Forbidden", [("Content-Length", str(len(body)))])
                return [body]
        return self._app(environ, start_response)

    def _check_presigned(self, environ: dict[str, Any], query: dict[str, str]) -> str:
        """What is wrong with a presigned request; an empty text where nothing is, and it is signed by its header."""
        from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        secret_of = dict(self.keys.values())
        key, _, region, *_ = query["X-Amz-Credential"].split("/")
        credentials = Credentials(key, secret_of.get(key, ""))
        # 1. Its time.
        signed_at = datetime.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
        if datetime.now(timezone.utc) > signed_at + timedelta(seconds=int(query["X-Amz-Expires"])):
            return "Request has expired"
        # 2. Its signature, over path, query and those headers that it names.
        headers = {"content-length": environ.get("CONTENT_LENGTH", "")}
        headers |= {name[5:].lower().replace("_", "-"): v for name, v in environ.items() if name.startswith("HTTP_")}
        signed = query["X-Amz-SignedHeaders"].split(";")
        unsigned = [name for name in headers if name.startswith("x-amz-") and name not in signed]
        if unsigned:
            return f"There were headers present in the request which were not signed: {unsigned}"
        rest = {name: value for name, value in query.items() if name != "X-Amz-Signature"}
        request = AWSRequest(
            environ["REQUEST_METHOD"],
            f"http://{environ['HTTP_HOST']}{environ['PATH_INFO']}?{urlencode(rest)}",
            {name: headers.get(name, "") for name in signed},
        )
        request.context["timestamp"] = query["X-Amz-Date"]
        checker = S3SigV4QueryAuth(credentials, "s3", region)
        computed = checker.signature(checker.string_to_sign(request, checker.canonical_request(request)), request)
        if computed != query["X-Amz-Signature"]:
            return "The request signature we calculated does not match the signature you provided"
        # 3. Its content.
        checksum = headers.get("x-amz-checksum-sha256")
        if checksum is not None and base64.b64encode(hashlib.sha256(body).digest()).decode() != checksum:
            return "The SHA256 you specified did not match the calculated checksum"
        # 4. moto gets it signed by its header.
        address = f"http://{environ['HTTP_HOST']}{environ['PATH_INFO']}"
        plain = AWSRequest(environ["REQUEST_METHOD"], address, {"Host": environ["HTTP_HOST"]}, body)
        S3SigV4Auth(credentials, "s3", region).add_auth(plain)
        for name in ("Authorization", "X-Amz-Date", "X-Amz-Content-SHA256"):
            environ[f"HTTP_{name.upper().replace('-', '_')}"] = plain.headers[name]
        environ["QUERY_STRING"] = ""
        return ""


def use_keys(monkeypatch: pytest.MonkeyPatch, key: str, secret: str) -> None:
    """Put keys into the environment, where the coordinator's store looks for them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
