# docker build -t constraintmatch .
# docker run --rm -it -p 127.0.0.1:8765:8765 -v "$PWD:/work" -v constraintmatch:/cache --user "$(id -u):$(id -g)" \
#     constraintmatch loop photos --clusters 10 --host 0.0.0.0 --no-browser
# Open the address that it prints, with localhost in the place of the container's name. The volume /cache keeps what was
# embedded. For a small image without CUDA: --build-arg PIP_EXTRA_INDEX_URL=, the index of torch's wheels for CPUs.
FROM python:3.12-slim
ARG PIP_EXTRA_INDEX_URL
COPY . /source
RUN pip install --no-cache-dir '/source[photos,web]' && rm -rf /source && mkdir -m 1777 /cache /work
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface MPLCONFIGDIR=/cache/matplotlib HOME=/cache
USER 1000
WORKDIR /work
ENTRYPOINT ["constraintmatch"]
CMD ["--help"]
