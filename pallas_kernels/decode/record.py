"""A record: one rank's part of one routed expert, MXFP4 codes and scales together, so that one DMA brings it.

int32 [rows, L], L the latent width, F the expert width of this rank:

    codes of gate and up   2F / 8 rows   word (i, l): nibble t is output 8 i + t of input l; gate's F outputs, then up's
    codes of down           F / 8 rows   word (i, l): nibble t is hidden channel 8 i + t of output l
    scales of gate and up                a chunk of lanes holds four groups of 32 inputs: lane o, byte t is the E8M0
                                         scale of output o in group 4 i + t; chunks fill a row's lanes, then the next's
    scales of down                       lane l, byte t is the scale of output l in group 4 i + t of hidden channels

Every rank holds a slice of every expert, hence no choice of experts makes one rank wait for another.
"""

from dataclasses import dataclass

from pallas_kernels.decode.config import LANES, DecodeConfig, round_up

GROUP = 32  # codes that share a scale
PER_WORD = 8  # codes in a word
SCALES = 4  # scales in a word


@dataclass(frozen=True)
class Record:
    latent: int
    expert: int

    @staticmethod
    def of(config: DecodeConfig) -> "Record":
        return Record(config.moe.latent, config.share(config.moe.expert))

    @property
    def up_rows(self) -> int:
        return 2 * self.expert // PER_WORD

    @property
    def down_rows(self) -> int:
        return self.expert // PER_WORD

    @property
    def up_chunk(self) -> int:
        """Lanes of a chunk of scales."""
        return round_up(2 * self.expert, LANES)

    @property
    def chunks_per_row(self) -> int:
        return self.latent // self.up_chunk

    @property
    def up_chunks(self) -> int:
        return -(-self.latent // (GROUP * SCALES))

    @property
    def up_scale_start(self) -> int:
        return self.up_rows + self.down_rows

    @property
    def down_scale_start(self) -> int:
        return self.up_scale_start + -(-self.up_chunks // self.chunks_per_row)

    @property
    def shape(self) -> tuple[int, int]:
        rows = self.down_scale_start + -(-self.expert // (GROUP * SCALES))
        return round_up(rows, 8), self.latent

    def chunk_at(self, chunk: int) -> tuple[int, int]:
        """(row, first lane) of a chunk of gate's and up's scales."""
        row, place = divmod(chunk, self.chunks_per_row)
        return self.up_scale_start + row, place * self.up_chunk
