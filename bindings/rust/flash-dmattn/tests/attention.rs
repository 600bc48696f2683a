//! The safe layer beside loops in float64, and what it refuses.
use flash_dmattn::*;

/// Numbers that every run repeats.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }

    fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }
}

/// An element with its value.
trait Number: Element + Default {
    /// What sums of it are off by, as a share of the largest.
    const TOLERANCE: f64;
    fn random(random: &mut Random) -> Self;
    fn value(self) -> f64;
}

impl Number for f32 {
    const TOLERANCE: f64 = 2e-5;
    fn random(random: &mut Random) -> f32 {
        random.below(1 << 16) as f32 / 32768.0 - 1.0
    }
    fn value(self) -> f64 {
        self.into()
    }
}

impl Number for Float16 {
    const TOLERANCE: f64 = 4e-3;
    fn random(random: &mut Random) -> Float16 {
        Float16((random.below(2) << 15 | (11 + random.below(4)) << 10 | random.below(1 << 10)) as u16)
    }
    fn value(self) -> f64 {
        let (exponent, fraction) = (i32::from(self.0 >> 10 & 31), f64::from(self.0 & 1023));
        let magnitude = match exponent {
            0 => fraction * 2f64.powi(-24),
            31 => f64::NAN,
            _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
        };
        if self.0 >> 15 == 1 {
            -magnitude
        } else {
            magnitude
        }
    }
}

impl Number for BFloat16 {
    const TOLERANCE: f64 = 3e-2;
    fn random(random: &mut Random) -> BFloat16 {
        BFloat16((f32::random(random).to_bits() >> 16) as u16)
    }
    fn value(self) -> f64 {
        f32::from_bits(u32::from(self.0) << 16).into()
    }
}

fn randoms<T: Number>(random: &mut Random, shape: &[i64]) -> Vec<T> {
    (0..length(shape)).map(|_| T::random(random)).collect()
}

fn values<T: Number>(data: &[T]) -> Vec<f64> {
    data.iter().map(|&each| each.value()).collect()
}

fn length(shape: &[i64]) -> usize {
    shape.iter().product::<i64>() as usize
}

/// A problem of B batches, H and Hkv heads, Sq rows, Sk keys, head dims D and Dv. What it does not have is empty.
struct Problem<'a, T> {
    sizes: [usize; 7],
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    dout: Vec<T>,
    dlse: Vec<f32>,
    mask: Vec<bool>,
    bias: Vec<f32>,
    start: Vec<i32>,
    end: Vec<i32>,
    sink: Vec<f32>,
    options: Options<'a>,
}

/// Of q, k and v (of dq, dk and dv too), out, lse, mask and bias, intervals.
struct Shapes {
    q: [i64; 4],
    k: [i64; 4],
    v: [i64; 4],
    out: [i64; 4],
    lse: [i64; 3],
    scores: [i64; 4],
    keys: [i64; 3],
    sink: [i64; 1],
}

fn shapes(sizes: [usize; 7]) -> Shapes {
    let [b, h, hkv, sq, sk, d, dv] = sizes.map(|each| each as i64);
    Shapes {
        q: [b, sq, h, d],
        k: [b, sk, hkv, d],
        v: [b, sk, hkv, dv],
        out: [b, sq, h, dv],
        lse: [b, h, sq],
        scores: [b, h, sq, sk],
        keys: [b, hkv, sk],
        sink: [h],
    }
}

fn random_problem<T: Number>(random: &mut Random) -> Problem<'static, T> {
    let hkv = 1 + random.below(3);
    let (heads, sq, sk) = (hkv * (1 + random.below(3)), 1 + random.below(40), 1 + random.below(40));
    let sizes = [1 + random.below(2), heads, hkv, sq, sk, 8 * (1 + random.below(6)), 8 * (1 + random.below(6))];
    let s = shapes(sizes);
    let mut some = |shape: &[i64]| if random.below(3) == 0 { length(shape) } else { 0 };
    let (masked, biased, intervals, sinks) = (some(&s.scores), some(&s.scores), some(&s.keys), some(&s.sink));
    Problem {
        sizes,
        q: randoms(random, &s.q),
        k: randoms(random, &s.k),
        v: randoms(random, &s.v),
        dout: randoms(random, &s.out),
        dlse: randoms(random, &s.lse),
        mask: (0..masked).map(|_| random.below(4) > 0).collect(),
        bias: (0..biased).map(|_| f32::random(random)).collect(),
        // Whatever they are, below 0 and past the last row too.
        start: (0..intervals).map(|_| random.one_of(&[i32::MIN, -3, 0, 1, 5])).collect(),
        end: (0..intervals).map(|_| random.one_of(&[i32::MAX, 100, 17, 3, 0, -2])).collect(),
        sink: (0..sinks).map(|_| f32::random(random)).collect(),
        options: Options {
            causal: random.below(2) == 0,
            softmax_scale: random.one_of(&[None, Some(0.5), Some(-0.3)]),
            softcap: random.one_of(&[0.0, 0.0, 2.0]),
            window_left: random.one_of(&[None, Some(0), Some(7)]),
            window_right: random.one_of(&[None, Some(3)]),
            num_threads: random.one_of(&[0, 1, 3]),
            lse_without_sink: sinks > 0 && random.below(2) == 0,
            ..Options::default()
        },
    }
}

/// out, lse, dq, dk, dv, dbias, dsink in float64.
type Results = [Vec<f64>; 7];

impl<T: Number> Problem<'_, T> {
    fn visible(&self, batch: usize, head: usize, row: usize, key: usize) -> bool {
        let [_, h, hkv, sq, sk, ..] = self.sizes;
        let place = key as i64 - (row as i64 + sk as i64 - sq as i64); // of the key beside the diagonal
        let o = &self.options;
        let at = (batch * hkv + head / (h / hkv)) * sk + key;
        (!o.causal || place <= 0)
            && o.window_left.map_or(true, |left| place >= -i64::from(left))
            && o.window_right.map_or(true, |right| place <= i64::from(right))
            && (self.mask.is_empty() || self.mask[((batch * h + head) * sq + row) * sk + key])
            && (self.start.is_empty() || (self.start[at] <= row as i32 && (row as i32) < self.end[at]))
    }

    fn in_float64(&self) -> Results {
        let [b, h, hkv, sq, sk, d, dv] = self.sizes;
        let (q, k, v, dout) = (values(&self.q), values(&self.k), values(&self.v), values(&self.dout));
        let scale = self.options.softmax_scale.unwrap_or((d as f64).powf(-0.5));
        let cap = self.options.softcap;
        let zeros = |n: usize| vec![0f64; n];
        let mut out = zeros(b * sq * h * dv);
        let mut lse = zeros(b * h * sq);
        let (mut dq, mut dk, mut dvalue) = (zeros(q.len()), zeros(k.len()), zeros(v.len()));
        let (mut dbias, mut dsink) = (zeros(b * h * sq * sk), zeros(h));
        for item in 0..b * h * sq {
            let (batch, head, row) = (item / (h * sq), item / sq % h, item % sq);
            let of_q = (batch * sq + row) * h + head;
            let of_k = |key: usize| (batch * sk + key) * hkv + head / (h / hkv);
            let dot = |key: usize| (0..d).map(|c| q[of_q * d + c] * k[of_k(key) * d + c]).sum::<f64>() * scale;
            let capped = |score: f64| if cap > 0.0 { cap * (score / cap).tanh() } else { score };
            let bias = |key: usize| self.bias.get(item * sk + key).map_or(0.0, |&bias| bias.into());
            let keys: Vec<usize> = (0..sk).filter(|&key| self.visible(batch, head, row, key)).collect();
            let weights: Vec<f64> = keys.iter().map(|&key| (capped(dot(key)) + bias(key)).exp()).collect();
            let sink = self.sink.get(head).map_or(0.0, |&sink| f64::from(sink).exp());
            let sum = weights.iter().sum::<f64>() + sink;
            let of_lse = if self.options.lse_without_sink { weights.iter().sum() } else { sum };
            lse[item] = if of_lse > 0.0 { of_lse.ln() } else { f64::INFINITY };
            let dlse = if of_lse > 0.0 { f64::from(self.dlse[item]) / of_lse } else { 0.0 }; // of the sum
            for (&key, weight) in keys.iter().zip(&weights) {
                (0..dv).for_each(|c| out[of_q * dv + c] += weight / sum * v[of_k(key) * dv + c]);
            }
            let delta: f64 = (0..dv).map(|c| dout[of_q * dv + c] * out[of_q * dv + c]).sum();
            dsink[head] -= if sum > 0.0 { sink / sum * delta } else { 0.0 };
            dsink[head] += if self.options.lse_without_sink { 0.0 } else { sink * dlse };
            for (&key, weight) in keys.iter().zip(&weights) {
                let p = weight / sum;
                let dp: f64 = (0..dv).map(|c| dout[of_q * dv + c] * v[of_k(key) * dv + c]).sum();
                let ds = p * (dp - delta) + weight * dlse;
                dbias[item * sk + key] = ds;
                let slope = if cap > 0.0 { 1.0 - (dot(key) / cap).tanh().powi(2) } else { 1.0 };
                for c in 0..d {
                    dq[of_q * d + c] += scale * slope * ds * k[of_k(key) * d + c];
                    dk[of_k(key) * d + c] += scale * slope * ds * q[of_q * d + c];
                }
                (0..dv).for_each(|c| dvalue[of_k(key) * dv + c] += p * dout[of_q * dv + c]);
            }
        }
        [out, lse, dq, dk, dvalue, dbias, dsink]
    }

    fn by_library(&self) -> Result<Results, Error> {
        let s = shapes(self.sizes);
        let mut inputs = Inputs {
            q: View::new(&self.q, &s.q)?,
            k: View::new(&self.k, &s.k)?,
            v: View::new(&self.v, &s.v)?,
            ..Inputs::default()
        };
        let (biased, sinks) = (!self.bias.is_empty(), !self.sink.is_empty());
        if !self.mask.is_empty() {
            inputs.mask = View::new(&self.mask, &s.scores)?;
        }
        if biased {
            inputs.bias = View::new(&self.bias, &s.scores)?;
        }
        if !self.start.is_empty() {
            inputs.interval_start = View::new(&self.start, &s.keys)?;
            inputs.interval_end = View::new(&self.end, &s.keys)?;
        }
        if sinks {
            inputs.sink = View::new(&self.sink, &s.sink)?;
        }
        let mut out = vec![T::default(); length(&s.out)];
        let (mut lse, mut lse_low) = (vec![0f32; length(&s.lse)], vec![0f32; length(&s.lse)]);
        let outputs = Outputs {
            out: ViewMut::new(&mut out, &s.out)?,
            lse: ViewMut::new(&mut lse, &s.lse)?,
            lse_low: if biased { ViewMut::new(&mut lse_low, &s.lse)? } else { ViewMut::default() },
        };
        forward(&inputs, outputs, &self.options)?;
        let (mut dq, mut dk, mut dv) = (self.q.clone(), self.k.clone(), self.v.clone());
        let (mut dbias, mut dsink) = (vec![0f32; length(&s.scores)], vec![0f32; length(&s.sink)]);
        let saved = Saved {
            out: View::new(&out, &s.out)?,
            lse: View::new(&lse, &s.lse)?,
            lse_low: if biased { View::new(&lse_low, &s.lse)? } else { View::default() },
            dout: View::new(&self.dout, &s.out)?,
            dlse: View::new(&self.dlse, &s.lse)?,
        };
        let gradients = Gradients {
            dq: ViewMut::new(&mut dq, &s.q)?,
            dk: ViewMut::new(&mut dk, &s.k)?,
            dv: ViewMut::new(&mut dv, &s.v)?,
            dbias: if biased { ViewMut::new(&mut dbias, &s.scores)? } else { ViewMut::default() },
            dsink: if sinks { ViewMut::new(&mut dsink, &s.sink)? } else { ViewMut::default() },
        };
        backward(&inputs, &saved, gradients, &self.options)?;
        Ok([values(&out), values(&lse), values(&dq), values(&dk), values(&dv), values(&dbias), values(&dsink)])
    }
}

fn compare<T: Number>(seed: u64, problems: usize) {
    let mut random = Random(seed);
    for number in 0..problems {
        let problem: Problem<T> = random_problem(&mut random);
        let found = problem.by_library().unwrap();
        let wanted = problem.in_float64();
        let names = ["out", "lse", "dq", "dk", "dv", "dbias", "dsink"];
        let absent = [false, false, false, false, false, problem.bias.is_empty(), problem.sink.is_empty()];
        for i in (0..names.len()).filter(|&i| !absent[i]) {
            assert_eq!(found[i].len(), wanted[i].len());
            let largest = wanted[i].iter().filter(|each| each.is_finite()).fold(1f64, |a, b| a.max(b.abs()));
            for (at, (have, want)) in found[i].iter().zip(&wanted[i]).enumerate() {
                let near = have == want || (have - want).abs() <= T::TOLERANCE * largest;
                assert!(near, "problem {number}, {}[{at}] is {have}, not {want}; {:?}", names[i], problem.options);
            }
        }
    }
}

#[test]
fn float32_is_that_of_loops() {
    compare::<f32>(1, 60);
}

#[test]
fn float16_is_that_of_loops() {
    compare::<Float16>(2, 30);
}

#[test]
fn bfloat16_is_that_of_loops() {
    compare::<BFloat16>(3, 30);
}

fn message<T>(result: Result<T, Error>) -> String {
    let error = result.err().expect("a call that must fail has passed");
    assert_eq!(error.status, sys::FDM_ERROR_INVALID_ARGUMENT, "{error}");
    error.to_string()
}

#[test]
fn slices_have_the_length_of_their_shapes() {
    let mut data = [0f32; 12];
    for shape in [&[1, 3, 1, 5][..], &[1, 3, 1, 3], &[-3, -4], &[12, -1], &[i64::MAX, i64::MAX, 2], &[], &[0]] {
        let text = message(View::new(&data, shape));
        assert_eq!(text, format!("a slice has 12 elements; its shape {shape:?} must have as many"));
        assert_eq!(text, message(ViewMut::new(&mut data, shape)));
    }
    assert!(View::new::<f32>(&[], &[0, i64::MAX, 7]).is_ok());
    assert!(View::new(&data[..1], &[]).is_ok());
}

/// Attention of q [1, 3, 1, 4] with these, which fails and writes nothing; the library's sentence.
fn refused<T: Element>(k: &[i64], out: &[i64], kind: T, options: &Options<'_>) -> String {
    let (q, keys) = ([0f32; 12], vec![0f32; length(k)]);
    let (mut written, mut lse) = (vec![kind; length(out)], [5f32; 3]);
    let (view, keys) = (View::new(&q, &[1, 3, 1, 4]).unwrap(), View::new(&keys, k).unwrap());
    let inputs = Inputs { q: view, k: keys, v: keys, ..Inputs::default() };
    let (o, l) = (ViewMut::new(&mut written, out).unwrap(), ViewMut::new(&mut lse, &[1, 1, 3]).unwrap());
    let said = message(forward(&inputs, Outputs { out: o, lse: l, ..Outputs::default() }, options));
    assert_eq!(lse, [5.0; 3]);
    said
}

#[test]
fn shapes_and_options_that_do_not_fit_are_errors() {
    let (good, plain) = ([1, 3, 1, 4], Options::default());
    let says = |said: String, word: &str| assert!(said.contains(word), "'{said}' does not name {word}");
    says(refused(&[1, 3, 1, 5], &good, 0f32, &plain), "k ");
    says(refused(&[2, 3, 1, 4], &good, 0f32, &plain), "k ");
    says(refused(&[12], &good, 0f32, &plain), "k has 1 axes");
    says(refused(&good, &[1, 2, 1, 4], 0f32, &plain), "out ");
    says(refused(&good, &[0, 3, 1, 4], 0f32, &plain), "out ");
    says(refused(&good, &good, 0i32, &plain), "out ");
    says(refused(&good, &good, false, &plain), "out ");
    says(refused(&good, &good, 0f32, &Options { softcap: -1.0, ..plain }), "softcap");
    says(refused(&good, &good, 0f32, &Options { softmax_scale: Some(f64::NAN), ..plain }), "softmax_scale");
    let family = std::ffi::CString::new("none").unwrap();
    says(refused(&good, &good, 0f32, &Options { family: Some(&family), ..plain }), "none");
    says(message(forward(&Inputs::default(), Outputs::default(), &plain)), "q is NULL");
    says(message(backward(&Inputs::default(), &Saved::default(), Gradients::default(), &plain)), "q is NULL");
    says(message(topk_intervals(View::default(), 1, 1, ViewMut::default(), ViewMut::default())), "bias is NULL");
}

#[test]
fn packed_sequences_that_leave_their_tensors_are_errors() {
    let (data, shape) = ([0.5f32; 6 * 4], [6, 1, 4]);
    let view = View::new(&data, &shape).unwrap();
    for (ends, legal) in [([0, 2, 6], true), ([0, 2, 7], false), ([-1, 2, 6], false), ([0, 5, 2], false)] {
        let mut out = [0f32; 6 * 4];
        let cu_seqlens = View::new(&ends, &[3]).unwrap();
        let inputs = Inputs {
            q: view,
            k: view,
            v: view,
            cu_seqlens_q: cu_seqlens,
            cu_seqlens_k: cu_seqlens,
            ..Inputs::default()
        };
        let outputs = Outputs { out: ViewMut::new(&mut out, &shape).unwrap(), ..Outputs::default() };
        match forward(&inputs, outputs, &Options::default()) {
            Ok(()) => assert!(legal && out.iter().all(|each| (each - 0.5).abs() < 1e-6), "{ends:?}: {out:?}"),
            Err(error) => assert!(!legal && error.message.contains("cu_seqlens"), "{ends:?}: {error}"),
        }
    }
}

#[test]
fn empty_tensors_are_legal() {
    let (q, mut out, mut lse) = ([1f32; 8], [5f32; 8], [5f32; 2]);
    for (keys, legal) in [([1, 0, 1, 4], true), ([0, i64::MAX, i64::MAX, 4], false)] {
        let (q, k) = (View::new(&q, &[1, 2, 1, 4]).unwrap(), View::new::<f32>(&[], &keys).unwrap());
        let inputs = Inputs { q, k, v: k, ..Inputs::default() };
        let (out, lse) = (ViewMut::new(&mut out, &[1, 2, 1, 4]).unwrap(), ViewMut::new(&mut lse, &[1, 1, 2]).unwrap());
        let done = forward(&inputs, Outputs { out, lse, ..Outputs::default() }, &Options::default());
        assert_eq!(done.is_ok(), legal, "{keys:?}: {done:?}");
    }
    assert_eq!((out, lse), ([0.0; 8], [f32::INFINITY; 2])); // no row sees a key
}

#[test]
fn topk_intervals_keep_the_largest_biases() {
    let bias = [3f32, 1., 2., 5., 4.];
    let (mut start, mut end) = ([0i32; 5], [0i32; 5]);
    let shape = &[1, 1, 5];
    let (from, to) = (ViewMut::new(&mut start, shape).unwrap(), ViewMut::new(&mut end, shape).unwrap());
    topk_intervals(View::new(&bias, shape).unwrap(), 2, 5, from, to).unwrap();
    let rows = |row: i32| (0..5).filter(|&key| start[key] <= row && row < end[key]).collect::<Vec<_>>();
    assert_eq!(
        [rows(0), rows(1), rows(2), rows(3), rows(4)],
        [vec![0], vec![0, 1], vec![0, 2], vec![0, 3], vec![3, 4]]
    );
    let mut short = [0i32; 4];
    let (from, to) = (ViewMut::new(&mut start, shape).unwrap(), ViewMut::new(&mut short, &[1, 1, 4]).unwrap());
    assert!(message(topk_intervals(View::new(&bias, shape).unwrap(), 2, 5, from, to)).contains("end "));
    let (mut flags, mut more) = ([false; 5], [0i32; 5]);
    let (from, to) = (ViewMut::new(&mut flags, shape).unwrap(), ViewMut::new(&mut more, shape).unwrap());
    assert!(message(topk_intervals(View::new(&bias, shape).unwrap(), 2, 5, from, to)).contains("start "));
}

#[test]
fn each_thread_has_its_own_errors() {
    let threads: Vec<_> = (1..5i64)
        .map(|axes| {
            std::thread::spawn(move || {
                for _ in 0..200 {
                    let (data, shape) = ([0f32; 1], vec![1; axes as usize + 4]);
                    let q = View::new(&data, &shape).unwrap();
                    let said = message(forward(
                        &Inputs { q, k: q, v: q, ..Inputs::default() },
                        Outputs::default(),
                        &Options::default(),
                    ));
                    assert!(said.contains(&format!("has {} axes", axes + 4)), "{said}");
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
