# docker build -t constraintmatch .
# docker run --rm -it -p 8765:8765 -v "$PWD:/work" constraintmatch loop photos --clusters 10 --host 0.0.0.0 --no-browser
FROM python:3.12-slim
COPY . /source
RUN pip install --no-cache-dir '/source[photos,web]' && rm -rf /source
RUN useradd --create-home somebody
USER somebody
WORKDIR /work
ENTRYPOINT ["constraintmatch"]
CMD ["--help"]
