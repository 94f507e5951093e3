"""Files that lie elsewhere: `s3://`, `gs://`, `https://`, `hf://` and what else fsspec reads. Knows no run and no data.

`https://` needs no package. `s3://` and `gs://` are read by obstore, `hf://` by huggingface_hub: extra `remote`.
Credentials, regions and endpoints come from the environment (`AWS_...`, `GOOGLE_...`, `HF_TOKEN`).
"""

from jaxblt.remote.cache import RemoteCopy, cached_copies, user_cache
from jaxblt.remote.store import RemoteFile, download, list_files, remove, upload
from jaxblt.remote.urls import refuse_remote, scheme_of, url_of

__all__ = [
    "RemoteCopy",
    "RemoteFile",
    "cached_copies",
    "download",
    "list_files",
    "refuse_remote",
    "remove",
    "scheme_of",
    "upload",
    "url_of",
    "user_cache",
]
